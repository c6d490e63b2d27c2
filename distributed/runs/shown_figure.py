"""A matplotlib figure that a notebook shows. Imports matplotlib: for `distributed.runs.plotting` alone."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """Only figures of pyplot are shown as pictures by themselves, and pyplot is state of the whole process."""

    def _repr_png_(self) -> bytes:
        """What IPython shows."""
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
