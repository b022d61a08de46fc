"""``python -m pydml``: the same as the ``pydml`` command, for a Python whose scripts are not on the path."""

import sys

from pydml.cli import main

sys.exit(main())
