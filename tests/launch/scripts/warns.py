import sys
import warnings

import helper_that_warns

warnings.warn("shown, for it is __main__'s", DeprecationWarning)
warnings.warn("pending", PendingDeprecationWarning)
for _ in range(2):
    warnings.warn("once a line")
helper_that_warns.old(1)
helper_that_warns.old(2)
eval("0 is 0")
print(
    len(warnings.filters),
    sys.warnoptions,
    sorted(__warningregistry__["version":] if False else __warningregistry__, key=str)[:1],
)
