"""trivet: runs and looks at training runs."""

from services.cli.app import app

if __name__ == "__main__":
    app()
