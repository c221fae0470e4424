"""Scenes of Pathfinder: contours and two markers on ends of them, alike in both classes."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from experiments.arguments import UserError
from experiments.lra.contours import FAR, PathfinderParameters, add_distractors, grow_pairs


_SPARE = 0.3  # share of scenes that are made but not drawn, for want of a good partner
_MIN_SPARE = 20  # so many of each class at least


@dataclass(frozen=True)
class Scenes:
    """
    What is drawn in images. Points are complex numbers: pixels to the right, plus i times pixels down.

    Args:
        paddles (`np.ndarray` of shape `(num_scenes, num_paddles, 2)`):
            Both ends of each paddle, in order: the first long contour, the second, the distractors. NaN if not there.
        markers (`np.ndarray` of shape `(num_scenes, 2)`): Middles of the discs.
        parameters (`PathfinderParameters`): How they were made.
    """

    paddles: np.ndarray
    markers: np.ndarray
    parameters: PathfinderParameters

    def draw(self) -> np.ndarray:
        """Images as uint8 of shape `(num_scenes, image_size, image_size)`."""
        p = self.parameters
        side, scale, num_long = p.image_size, p.antialias_scale, 2 * p.contour_length
        levels = [p.snake_contrast * (p.paddle_contrast if n < num_long else 1) for n in range(p.num_paddles)]
        width, radius = max(1, round(p.paddle_thickness * scale)), p.marker_radius * scale - 0.5
        images = np.empty((len(self.paddles), side, side), dtype=np.uint8)
        ends = np.floor(np.nan_to_num(self.paddles, nan=-FAR).view(np.float64) * scale).astype(int).tolist()
        for number, markers in enumerate(np.floor(self.markers.view(np.float64) * scale).reshape(-1, 2, 2).tolist()):
            canvas = Image.new("F", (side * scale, side * scale))
            draw = ImageDraw.Draw(canvas)
            for line, level in zip(ends[number], levels, strict=True):
                draw.line(line, fill=level, width=width)
            for x, y in markers:
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1.0)
            reduced = np.asarray(canvas.resize((side, side), Image.Resampling.LANCZOS))
            images[number] = np.rint(255 * reduced.clip(0, 1))
        return images


def make_scenes(
    labels: np.ndarray, generator: np.random.Generator, parameters: PathfinderParameters | None = None
) -> Scenes:
    """
    A random scene for each label: markers at both ends of a long contour (1), or at the first end of one and the last
    of the other (0).

    Nothing but following a contour tells the classes apart: scenes are drawn in the same way for both, in couples of
    one of each class whose markers are nearly as far from each other and from the middle of the image.

    Raises:
        UserError: if contours with these parameters do not fit into an image.
    """
    p = parameters or PathfinderParameters()
    num_couples = int(max(np.count_nonzero(labels), np.count_nonzero(labels == 0)))
    spare = math.ceil(num_couples * (1 + _SPARE)) + _MIN_SPARE
    pairs = grow_pairs(2 * spare, p, generator)
    members, markers = _couple(pairs, num_couples, p, generator)
    chosen, places = np.empty(len(labels), dtype=np.int64), np.empty((len(labels), 2), dtype=np.complex128)
    for label in (0, 1):
        of_class = labels == label
        chosen[of_class] = members[: np.count_nonzero(of_class), label]
        places[of_class] = markers[: np.count_nonzero(of_class), label]
    return Scenes(add_distractors(pairs[chosen], p, generator), places, p)


def _couple(
    pairs: np.ndarray, num_couples: int, p: PathfinderParameters, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """
    Couples of pairs of contours whose markers lie alike, one of class 0 and one of class 1.

    Returns the numbers of the pairs in each couple `(num_couples, 2)` and their markers `(num_couples, 2, 2)`.
    """
    first, last = pairs[:, [0, p.contour_length], 0], pairs[:, [p.contour_length - 1, -1], 1]
    half = len(pairs) // 2
    # Half of the pairs for each class; of each pair both ways to mark it, by the contour of the first marker.
    ways = (
        np.stack([first[:half], last[:half, ::-1]], axis=-1),
        np.stack([first[half:], last[half:]], axis=-1),
    )
    middle = p.image_size * (0.5 + 0.5j)
    features = []
    for markers in ways:
        apart = np.abs(markers[..., :1] - markers[..., 1:])
        apart[apart < 2 * p.marker_radius + 1] = np.nan  # these would be one
        features.append(np.concatenate([apart, np.abs(markers - middle)], axis=-1))
    costs = np.stack([cdist(features[0][:, i], features[1][:, j]) for i in (0, 1) for j in (0, 1)])
    costs = np.nan_to_num(costs, nan=FAR)
    way, cost = costs.argmin(axis=0), costs.min(axis=0)
    couples = np.stack(linear_sum_assignment(cost), axis=1)
    couples = couples[np.argsort(cost[tuple(couples.T)])[:num_couples]]
    if cost[tuple(couples.T)].max() >= FAR:
        raise UserError(f"The ends of contours are nearer than two markers with {p}; make markers smaller.")
    couples = generator.permutation(couples)
    way = way[tuple(couples.T)]
    markers = np.stack([ways[0][couples[:, 0], way // 2], ways[1][couples[:, 1], way % 2]], axis=1)
    return couples + np.array([0, half]), markers
