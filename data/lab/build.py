"""Rebuild the lab from text: `python -m ecospec.data.lab.build --text-dir DIR`, in a checkout.

The recipe behind it (`ecospec.data.lab.recipe.stages`) is not part of wheels, this front is.
"""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if not find_spec("ecospec.data.lab.recipe"):
        sys.exit("the lab's recipe is not part of an installed package: run this in a checkout of the repository")
    from ecospec.data.lab.recipe.stages import main

    main()
