"""A figure that every notebook shows as a picture."""

import io

from matplotlib.figure import Figure


class CellFigure(Figure):
    """A figure that IPython shows as a picture, although pyplot did not make it."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
