"""Curved dashed contours that do not touch: what Pathfinder shows."""

import math
from dataclasses import dataclass

import numpy as np

from experiments.arguments import UserError


_CHOICES = 12  # places tried for a paddle, one after the other
_BACK = 8  # fewer than so many paddles are taken away where there is no place for the next
_RESTARTS = 0.05  # or all of them, in this share of cases
_MAX_TURNS = 5000  # until one more pair of contours should be there
_TRIALS = 20  # of a distractor
_CACHED = 64  # scenes looked at together
FAR = 1e4  # where paddles are that are not there yet
# Equally likely turns: the chance of an angle is its squared cosine.
_ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 2001)
_TURNS = np.interp(np.linspace(0, 1, 4096), (_ANGLES + np.sin(2 * _ANGLES) / 2) / np.pi + 0.5, _ANGLES)


@dataclass(frozen=True)
class PathfinderParameters:
    """
    What images look like; lengths are in pixels. By default what Long Range Arena gave to the generator of
    [Linsley et al.](https://arxiv.org/abs/1805.08315).

    Args:
        image_size (`int`): Side of an image.
        padding (`int`): Width of the border without contours.
        contour_length (`int`): Paddles, the dashes, of each of the two long contours.
        distractor_length (`int`): Paddles of each other contour.
        num_distractors (`int`): Other contours, fewer where there is no place left.
        paddle_length (`float`): From end to end.
        paddle_thickness (`float`): Times `antialias_scale` it is rounded.
        paddle_margin (`float`): Half of the gap between two paddles; contours keep twice as much of each other.
        seed_distance (`float`): Between the first ends of the long contours, near the middle of the image.
        continuity (`float`): How straight contours are: paddles turn by less than a right angle divided by it.
        marker_radius (`float`): Of the two discs.
        antialias_scale (`int`): Images are drawn so many times larger, then reduced.
        snake_contrast (`float`): Brightness of a paddle before reduction, which halves it; markers have 1.
        paddle_contrast (`float`): What it is multiplied by in the long contours.

    Raises:
        UserError: if one of them is impossible.
    """

    image_size: int = 32
    padding: int = 1
    contour_length: int = 14
    distractor_length: int = 14 // 3
    num_distractors: int = 20 // (14 // 3)
    paddle_length: float = 2
    paddle_thickness: float = 0.5
    paddle_margin: float = 1
    seed_distance: float = 7
    continuity: float = 1.0
    marker_radius: float = 1.5
    antialias_scale: int = 2
    snake_contrast: float = 2
    paddle_contrast: float = 0.75

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = {"padding": 0, "num_distractors": 0, "contour_length": 2}.get(name, 1e-6)
            if value < least:
                raise UserError(
                    f"{name} is {value}; it must be {f'at least {least}' if least != 1e-6 else 'above 0'}."
                )
        # So that the first paddles, whichever way they look, neither meet nor leave the image.
        nearest = 2 * self.paddle_length + math.hypot(self.clearance, self.paddle_length / 2)
        outermost = math.sqrt(2) * self.seed_range + self.seed_distance / 2 + self.paddle_length
        if self.seed_distance < nearest or outermost > self.image_size / 2 - self.padding:
            raise UserError(
                f"seed_distance is {self.seed_distance}; with paddles of {self.paddle_length} in an image of "
                f"{self.image_size} it must be at least {nearest:.1f} and leave them inside."
            )

    @property
    def seed_range(self) -> float:
        """How far from the middle of the image, across and down, the middle between two seeds may be."""
        return max(0.0, self.image_size / 2 - 2 * self.seed_distance)

    @property
    def num_paddles(self) -> int:
        """Of an image with all distractors."""
        return 2 * self.contour_length + self.num_distractors * self.distractor_length

    @property
    def clearance(self) -> float:
        """Least distance between the middle lines of two paddles that do not follow each other."""
        return 2 * self.paddle_margin + self.paddle_thickness


def grow_pairs(count: int, p: PathfinderParameters, generator: np.random.Generator) -> np.ndarray:
    """
    Paddles of `count` pairs of long contours.

    Both grow in turns from seeds near the middle. Where there is no place for a paddle, some of the last are
    taken away.
    """
    paddles = np.full((count, 2 * p.contour_length, 2), FAR, dtype=np.complex128)
    turn = np.arange(2 * p.contour_length).reshape(p.contour_length, 2).T.ravel()  # of the paddle in each slot
    slots = np.argsort(turn)
    done = np.zeros(count, dtype=np.int64)  # paddles of each pair
    turns, waiting = 0, count
    while len(rows := np.flatnonzero(done < len(turn))):
        turns, waiting = turns + 1 if len(rows) == waiting else 0, len(rows)
        if turns == _MAX_TURNS:
            raise UserError(f"Contours do not come to their end with {p}; make them shorter.")
        tried = paddles[rows]
        new = done[rows] == 0
        if new.any():
            tried[new] = _sow(int(new.sum()), p, generator)
            done[rows[new]] = 2
        slot = slots[done[rows]]
        placed = _extend(tried, slot, p, generator)
        back = np.where(generator.random(len(rows)) < _RESTARTS, len(turn), generator.integers(1, _BACK, len(rows)))
        done[rows] += np.where(placed, 1, -back)
        # Back at the seeds, a pair begins anew.
        done[done < 3] = 0
        tried[turn >= done[rows, None]] = FAR
        paddles[rows] = tried
    return paddles


def _sow(count: int, p: PathfinderParameters, generator: np.random.Generator) -> np.ndarray:
    """
    The first paddle of each contour, `seed_distance` apart.

    Differs from the published generator: there the first seed, and not the middle between both, lies within
    `seed_range` of the middle of the image.
    """
    paddles = np.full((count, 2 * p.contour_length, 2), FAR, dtype=np.complex128)
    middle = p.image_size * (0.5 + 0.5j) + p.seed_range * (generator.uniform(-1, 1, (count, 2)) @ [1, 1j])
    half = p.seed_distance / 2 * _directions(generator, (count,))
    paddles[:, [0, p.contour_length], 0] = np.stack([middle - half, middle + half], axis=1)
    steps = p.paddle_length * _directions(generator, (count, 2))
    paddles[:, [0, p.contour_length], 1] = paddles[:, [0, p.contour_length], 0] + steps
    return paddles


def add_distractors(pairs: np.ndarray, p: PathfinderParameters, generator: np.random.Generator) -> np.ndarray:
    """Pairs of contours with as many distractors behind them as find a place."""
    paddles = np.full((len(pairs), p.num_paddles, 2), FAR, dtype=np.complex128)
    paddles[:, : pairs.shape[1]] = pairs
    for first in range(pairs.shape[1], p.num_paddles, p.distractor_length):
        waiting = np.arange(len(pairs))
        for _ in range(_TRIALS):
            tried = paddles[waiting]
            seeds = generator.uniform(0, p.image_size, (len(waiting), _CHOICES, 2)) @ [1, 1j]
            slot = np.full(len(waiting), first)
            placed = _put(tried, slot, seeds, _directions(generator, seeds.shape[:2]), p)
            for _ in range(1, p.distractor_length):
                slot += 1
                placed &= _extend(tried, slot, p, generator)
            paddles[waiting[placed], first : slot[0] + 1] = tried[placed, first : slot[0] + 1]
            waiting = waiting[~placed]
            if not len(waiting):
                break
    paddles[paddles == FAR] = np.nan
    return paddles


def _extend(
    paddles: np.ndarray, slot: np.ndarray, p: PathfinderParameters, generator: np.random.Generator
) -> np.ndarray:
    """Put a paddle into each scene's `slot`, behind the one before it, at a random turn; which found a place."""
    tail, head = paddles[np.arange(len(paddles)), slot - 1].T
    heading = (head - tail) / p.paddle_length
    turns = _TURNS[generator.integers(0, len(_TURNS), (len(paddles), _CHOICES))] / p.continuity
    headings = heading[:, None] * np.exp(1j * turns)
    pivots = head + p.paddle_margin * heading
    return _put(paddles, slot, pivots[:, None] + p.paddle_margin * headings, headings, p, following=True)


def _put(
    paddles: np.ndarray,
    slot: np.ndarray,
    tails: np.ndarray,
    headings: np.ndarray,
    p: PathfinderParameters,
    following: bool = False,
) -> np.ndarray:
    """
    Put a paddle into each scene's `slot`, at the first of its choices that is free; which found a place.

    Free is what lies inside of the padding, with room for a gap behind it, and with both ends so far from all ends of
    other paddles, but for the one that it follows, that no two lines come nearer than the clearance.
    """
    rows = np.arange(len(paddles))
    ends = np.stack([tails, tails + p.paddle_length * headings], axis=-1)  # (scenes, choices, 2)
    behind = ends[..., 1] + p.paddle_margin * headings
    reach = p.image_size / 2 - p.padding
    free = np.ones(tails.shape, dtype=bool)
    for points in (tails, behind):
        free &= (np.abs(points.real - p.image_size / 2) <= reach) & (np.abs(points.imag - p.image_size / 2) <= reach)
    others = paddles.copy()
    if following:
        others[rows, slot - 1] = FAR
    least = p.clearance**2 + (p.paddle_length / 2) ** 2
    # This is where the time goes: single precision, each coordinate by itself, and no more than fits into a cache.
    for some in np.array_split(rows, math.ceil(len(rows) / _CACHED)):
        across, down = (
            new.astype(np.float32).reshape(len(some), -1, 1) - old.astype(np.float32).reshape(len(some), 1, -1)
            for new, old in ((ends[some].real, others[some].real), (ends[some].imag, others[some].imag))
        )
        across *= across
        down *= down
        across += down
        free[some] &= (across.min(axis=2) >= least).reshape(len(some), -1, 2).all(axis=-1)
    paddles[rows, slot] = ends[rows, free.argmax(axis=1)]
    return np.any(free, axis=1)


def _directions(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.exp(2j * np.pi * generator.random(shape))
