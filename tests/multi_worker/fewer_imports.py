"""Imported before Keras, whose plots and wrappers take a third of the time that a worker starts.

They import scikit-learn and Matplotlib wherever these are installed.
"""

import sys

for name in ("sklearn", "matplotlib"):
    sys.modules.setdefault(name, None)
