"""`python -m trainer`, the same as the console script `trainer`.

What Python itself imports before this line it looks for in the working directory first, and `trainer` too:
the console script and `python -P -m trainer` do not.
"""

import sys

if __name__ == "__main__":
    # before any import: a `random.py` or `yaml.py` in the working directory must not be executed
    working_directory = "" if sys.flags.safe_path else sys.path.pop(0)
    from trainer.cli import main
    from trainer.config.interpreter import keep_checkout

    keep_checkout(working_directory)
    sys.exit(main())
