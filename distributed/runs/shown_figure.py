"""A matplotlib figure that a notebook shows.

Imports matplotlib: only `distributed.runs.plotting` may import this module.
"""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that a notebook shows as a picture.

    Without this class, notebooks show only figures of pyplot, and pyplot has global state.
    """

    def _repr_png_(self) -> bytes:
        """Return the picture that IPython shows, as PNG."""
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
