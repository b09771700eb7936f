"""Ends with 0 when the service in this container is ready: `python healthcheck.py [PORT]`."""

import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 8.0


def main() -> int:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/readyz", timeout=TIMEOUT_SECONDS) as answer:
            return 0 if answer.status == 200 else 1
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)  # noqa: T201
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
