// npm run check: writes each dashboard as a TypeScript constant, so that its literals keep their types, and compiles all.
import { execFileSync } from "node:child_process";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const dashboards = process.argv[2] ?? join(here, "..", "dashboards");
const generated = join(here, "generated");

const names = readdirSync(dashboards).filter((name) => name.endsWith(".json"));
if (names.length === 0) {
  console.error(`${dashboards} holds no dashboard`);
  process.exit(1);
}
rmSync(generated, { recursive: true, force: true });
mkdirSync(generated);
for (const name of names) {
  const model = readFileSync(join(dashboards, name), "utf8");
  const lines = ['import type { TrivetDashboard } from "../types.js";', `export default ${model.trim()} satisfies TrivetDashboard;`];
  writeFileSync(join(generated, name.replace(/\.json$/, ".ts")), lines.join("\n") + "\n");
}
try {
  execFileSync(process.execPath, [join(here, "node_modules", "typescript", "bin", "tsc"), "-p", here], { stdio: "inherit" });
} catch {
  process.exit(1);
}
console.log(`${names.length} dashboards have Grafana's types`);
