"""trivet: starts and inspects training runs."""

from services.cli.app import app

if __name__ == "__main__":
    app()
