"""python -m lean_attention doctor"""

import sys

from lean_attention import doctor

if sys.argv[1:] != ["doctor"]:
    sys.exit("usage: python -m lean_attention doctor")
sys.exit(doctor.main())
