"""The words in a picture: drawn as SVG whose text stays text."""

from collections.abc import Callable
import pathlib
import tempfile
from xml.etree import ElementTree

import matplotlib


def of(draw: Callable[[pathlib.Path], None]) -> set[str]:
  """Every piece of text that `draw(path)` puts into its picture."""
  with (
      tempfile.TemporaryDirectory() as folder,
      matplotlib.rc_context({'svg.fonttype': 'none'}),
  ):
    path = pathlib.Path(folder, 'plot.svg')
    draw(path)
    texts = ElementTree.parse(path).iter('{http://www.w3.org/2000/svg}text')
    return {' '.join(''.join(t.itertext()).split()) for t in texts}
