"""`python -m benchmarks.learning`, from the folder of the checkout."""

import sys

from benchmarks.learning.run import main

sys.exit(main())
