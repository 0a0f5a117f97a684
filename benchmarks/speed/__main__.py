"""`python -m benchmarks.speed`, from the folder of the checkout."""

import sys

from benchmarks.speed.run import main

sys.exit(main())
