"""``python -m pagedserve``: the command line, where its script is not on the path."""

from pagedserve.cli import run

if __name__ == "__main__":
    run()
