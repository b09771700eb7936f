// A dashboard's JSON in Grafana's own types, with the options of each kind of panel.
import type * as schema from "@grafana/schema";
import type * as heatmap from "@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen.js";
import type * as stat from "@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.js";
import type * as text from "@grafana/schema/dist/types/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen.js";
import type * as timeseries from "@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.js";

// JSON holds an enum's values, not its members.
type Plain<T> = T extends string
  ? `${T}`
  : T extends (infer U)[]
    ? Plain<U>[]
    : T extends object
      ? { [K in keyof T]: Plain<T[K]> }
      : T;

interface Target extends schema.DataQuery {
  refId: string;
  datasource: schema.DataSourceRef;
  editorMode: "code";
  expr: string;
  legendFormat: string;
  range: boolean;
  instant: boolean;
  format: "time_series" | "heatmap";
}

interface Query<Kind extends string, Options, Custom> {
  type: Kind;
  id: number;
  title: string;
  description: string;
  datasource: schema.DataSourceRef;
  gridPos: schema.GridPos;
  links: schema.DashboardLink[];
  targets: Target[];
  options: Options;
  fieldConfig: schema.FieldConfigSource<Custom>;
}

interface Text {
  type: "text";
  id: number;
  title: string;
  gridPos: schema.GridPos;
  options: text.Options;
  fieldConfig: schema.FieldConfigSource;
}

type AnyPanel =
  | Query<"timeseries", timeseries.Options, timeseries.FieldConfig>
  | Query<"stat", stat.Options, never>
  | Query<"heatmap", heatmap.Options, heatmap.FieldConfig>
  | Text;

interface Row {
  type: "row";
  id: number;
  title: string;
  collapsed: boolean;
  gridPos: schema.GridPos;
  panels: AnyPanel[];
}

interface Annotation extends schema.AnnotationQuery {
  expr: string;
  titleFormat: string;
  textFormat: string;
  step: string;
}

export type TrivetDashboard = Plain<
  Omit<schema.Dashboard, "panels" | "annotations"> & {
    uid: string;
    title: string;
    description: string;
    panels: (AnyPanel | Row)[];
    annotations: { list: Annotation[] };
  }
>;

// What is checked above is what Grafana takes.
type Assert<T extends true> = T;
export type RowIsGrafanas = Assert<Row extends Omit<schema.RowPanel, "panels"> ? true : false>;
export type PanelIsGrafanas = Assert<
  Query<"timeseries", timeseries.Options, timeseries.FieldConfig> extends Omit<
    schema.Panel<timeseries.Options, timeseries.FieldConfig>,
    "options" | "targets"
  >
    ? true
    : false
>;
