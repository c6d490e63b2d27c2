"""A matplotlib figure that a notebook shows.

Imports matplotlib: only `distributed.runs.plotting` may import this module.
"""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure with a picture for notebooks.

    Only figures of pyplot have one by themselves, and pyplot is global state.
    """

    def _repr_png_(self) -> bytes:
        """Return the picture that IPython shows."""
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
