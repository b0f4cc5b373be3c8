"""The command ``ckptd``.

Exit codes: 0 all is well; 2 the command was wrong; 3 the store failed or could not tell; 4 and 5 what is stored is
damaged; 6 no such checkpoint; 9 the run is in use; 10 no daemon; 11 a check of ``doctor`` or
``preflight`` failed, or too few resources; 12 a deadline passed; 13 the newest checkpoint is damaged, but an older one
is good; 14 ``preflight`` names a bad node; 1 anything else.
"""

from ckptd.cli.app import main

__all__ = ["main"]
