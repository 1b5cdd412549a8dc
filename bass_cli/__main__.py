"""The console script, and `python -m bass_cli`: settles what signals mean before anything slow is imported."""

from bass_cli import signals


def main() -> None:
    """Run the command line; never returns."""
    signals.at_start()
    from bass_cli import cli

    cli.main()


if __name__ == "__main__":
    main()
