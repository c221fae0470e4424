"""Pathfinder: labels by following the drawn contours, classes that nothing else tells apart, files and bad ones."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from experiments.arguments import UserError
from experiments.lra.contours import PathfinderParameters
from experiments.lra.pathfinder import generate_pathfinder, read_pathfinder
from experiments.lra.scenes import Scenes, make_scenes


@pytest.fixture(scope="module")
def scenes() -> tuple[Scenes, np.ndarray]:
    labels = np.random.default_rng(0).permutation(np.arange(60) % 2)
    return make_scenes(labels, np.random.default_rng(1)), labels


def contours_of(paddles: np.ndarray, p: PathfinderParameters) -> list[np.ndarray]:
    """The paddles of each contour of a scene; a contour is whole or not there."""
    lengths = [p.contour_length] * 2 + [p.distractor_length] * p.num_distractors
    contours = np.split(paddles, np.cumsum(lengths)[:-1])
    assert all(np.isnan(contour).all() or not np.isnan(contour).any() for contour in contours)
    return [contour for contour in contours if not np.isnan(contour).any()]


def walk(paddles: np.ndarray, p: PathfinderParameters, start: complex) -> complex:
    """The end of the dashes that go on from `start`: always to the nearest end that is not yet behind us."""
    dashes = [tuple(dash) for dash in paddles if not np.isnan(dash).any()]
    place = start
    while True:
        near = [dash for dash in dashes if min(abs(end - place) for end in dash) < 2 * p.paddle_margin + 1e-6]
        if not near:
            return place
        dash = min(near, key=lambda dash: min(abs(end - place) for end in dash))
        dashes.remove(dash)
        place = max(dash, key=lambda end: abs(end - place))


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Least distance between points along the dashes of two contours."""
    steps = np.linspace(0, 1, 21)
    points = [(dashes[:, :1] + steps * (dashes[:, 1:] - dashes[:, :1])).ravel() for dashes in (first, second)]
    return np.abs(points[0][:, None] - points[1][None]).min()


def test_following_a_contour_gives_the_label(scenes):
    made, labels = scenes
    for paddles, markers, label in zip(made.paddles, made.markers, labels, strict=True):
        ends = [contour[[0, -1], [0, 1]] for contour in contours_of(paddles, made.parameters)[:2]]
        on = [np.flatnonzero([marker in pair for pair in ends]).tolist() for marker in markers]
        assert [len(contours) for contours in on] == [1, 1]
        assert (on[0] == on[1]) == label
        assert markers[0] != markers[1]
        assert (abs(walk(paddles, made.parameters, markers[0]) - markers[1]) < 1e-9) == label


def reached(image: np.ndarray, start: complex, reach: float) -> np.ndarray:
    """The bright pixels that lead to `start` by steps of at most `reach`, as complex numbers."""
    rows, columns = np.nonzero(image > 64)
    waiting, found = columns + 0.5 + 1j * (rows + 0.5), np.array([start])
    new = found
    while len(new):
        near = (np.abs(waiting[:, None] - new) <= reach).any(axis=1)
        new, waiting = waiting[near], waiting[~near]
        found = np.concatenate([found, new])
    return found


def test_what_is_drawn_joins_the_markers_of_a_contour(scenes):
    """In thin lines, eight times as large: gaps are at most 16 pixels then, and other lines at least 20 away."""
    made, labels = scenes
    lengths = ("image_size", "padding", "paddle_length", "paddle_margin", "seed_distance")
    large = {name: 8 * getattr(made.parameters, name) for name in lengths}
    thin = {"paddle_thickness": 1, "marker_radius": 1, "antialias_scale": 1}
    images = Scenes(8 * made.paddles, 8 * made.markers, replace(made.parameters, **large, **thin)).draw()
    for image, (first, second), label in list(zip(images, 8 * made.markers, labels, strict=True))[:20]:
        assert (np.abs(reached(image, first, 18) - second).min() < 2) == label


def test_contours_are_curved_dashes_that_do_not_touch(scenes):
    made, _ = scenes
    p = made.parameters
    numbers = []
    for paddles in made.paddles:
        contours = contours_of(paddles, p)
        numbers.append(len(contours))
        for contour in contours:
            np.testing.assert_allclose(np.abs(contour[:, 1] - contour[:, 0]), p.paddle_length)
            gaps = np.abs(contour[1:, 0] - contour[:-1, 1])
            assert (gaps <= 2 * p.paddle_margin + 1e-9).all()
            assert (gaps >= np.sqrt(2) * p.paddle_margin - 1e-9).all()  # at most a right angle
            inside = np.stack([contour.real, contour.imag])
            assert inside.min() >= p.padding
            assert inside.max() <= p.image_size - p.padding
        for first, second in itertools.combinations(contours, 2):
            assert distance(first, second) >= p.clearance - 1e-6
        assert abs(abs(contours[0][0, 0] - contours[1][0, 0]) - p.seed_distance) < 1e-9
    assert max(numbers) == 2 + p.num_distractors
    assert np.mean(numbers) > 5


def test_contours_do_not_touch_in_the_image(scenes):
    made, _ = scenes
    p = made.parameters
    for paddles in made.paddles[:10]:
        drawn = []
        for contour in contours_of(paddles, p):
            alone = np.full_like(paddles, np.nan)[None]
            alone[0, : len(contour)] = contour
            # Far outside, where markers are not seen.
            image = Scenes(alone, np.full((1, 2), -99 - 99j), p).draw()[0]
            drawn.append(np.argwhere(image > 64))
            # All of its dashes are there.
            middles = np.floor(contour.mean(axis=1)[:, None].view(np.float64))[:, ::-1]
            assert np.abs(middles[:, None] - drawn[-1][None]).max(axis=2).min(axis=1).max() <= 1
        for first, second in itertools.combinations(drawn, 2):
            assert np.linalg.norm(first[:, None] - second[None], axis=2).min() > 1


def test_markers_are_the_brightest(scenes):
    made, _ = scenes
    images = made.draw()
    assert images.shape == (60, 32, 32)
    assert images.dtype == np.uint8
    for image, markers in zip(images, made.markers, strict=True):
        for marker in markers:
            row, column = min(31, int(marker.imag)), min(31, int(marker.real))
            assert image[row, column] > 230
    assert 0.05 < (images > 64).mean() < 0.3


@pytest.mark.slow
def test_statistics_do_not_tell_the_classes_apart():
    labels = np.arange(2400) % 2
    made = [make_scenes(part, np.random.default_rng(n)) for n, part in enumerate(np.split(labels, 6))]
    images = np.concatenate([part.draw() for part in made]).astype(float)
    markers = np.concatenate([part.markers for part in made])
    rows, columns = np.mgrid[:32, :32] - 15.5
    ink = images.sum(axis=(1, 2))
    statistics = np.stack(
        [
            ink,
            np.abs(markers[:, 0] - markers[:, 1]),
            *np.abs(markers - (16 + 16j)).T,
            (images * rows).sum(axis=(1, 2)) / ink,
            (images * columns).sum(axis=(1, 2)) / ink,
            np.sqrt((images * (rows**2 + columns**2)).sum(axis=(1, 2)) / ink),
        ],
        axis=1,
    )
    # Predictions for images it was not fitted to; by chance alone the accuracy has a deviation of 1 %.
    for degree, chosen in ((1, statistics[:, :2]), (1, statistics), (2, statistics)):
        model = make_pipeline(PolynomialFeatures(degree), StandardScaler(), LogisticRegression(max_iter=1000))
        accuracy = (cross_val_predict(model, chosen, labels, cv=5) == labels).mean()
        assert accuracy < 0.52, (degree, chosen.shape)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"contour_length": 1}, "contour_length is 1; it must be at least 2"),
        ({"marker_radius": 0}, "marker_radius is 0; it must be above 0"),
        ({"seed_distance": 4}, "seed_distance is 4; .* at least 6.7"),
        ({"seed_distance": 28}, "seed_distance is 28; .* leave them inside"),
        ({"contour_length": 60}, "Contours do not come to their end with .*contour_length=60"),
        ({"marker_radius": 30, "contour_length": 4}, "nearer than two markers"),
    ],
)
def test_impossible_parameters(parameters, message, monkeypatch):
    monkeypatch.setattr("experiments.lra.contours._MAX_TURNS", 300)  # what never ends is known sooner
    with pytest.raises(UserError, match=message):
        make_scenes(np.array([0, 1]), np.random.default_rng(0), PathfinderParameters(**parameters))


def test_files_are_the_same_for_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.lra.pathfinder._PART", 15)  # several parts, of which none may be left out
    for name, seed, processes in (("one", 0, 1), ("two", 0, 2), ("other", 1, 1)):
        generate_pathfinder(tmp_path / f"{name}.npz", 41, seed, processes, SMALL)
    made = {name: np.load(tmp_path / f"{name}.npz") for name in ("one", "two", "other")}
    assert made["one"]["images"].shape == (41, 1024)
    assert sorted(np.bincount(made["one"]["labels"])) == [20, 21]
    for key in ("images", "labels"):
        np.testing.assert_array_equal(made["one"][key], made["two"][key])
        assert (made["one"][key] != made["other"][key]).any()
    assert len(np.unique(made["one"]["images"], axis=0)) == 41
    assert made["one"]["images"].max(axis=1).min() > 100
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.npz", "other.npz", "two.npz"]
    with pytest.raises(UserError, match="0 images: give at least 1"):
        generate_pathfinder(tmp_path / "none.npz", 0)


SMALL = PathfinderParameters(contour_length=5, num_distractors=1)


@pytest.fixture
def images() -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(20) % 2
    return make_scenes(labels, np.random.default_rng(0), SMALL).draw(), labels


def write_folder(folder, images, labels, as_array=False):
    """As the published one is: rows of text in files named .npy, or arrays of words as the generator writes them."""
    (folder / "metadata").mkdir(parents=True)
    for part in (0, 1):
        (folder / f"imgs/{part}").mkdir(parents=True)
        rows = [
            [f"imgs/{part}", f"sample_{n}.png", str(n), str(labels[n]), "1.0", "14", "4", "2", "0.5", "1", "1"]
            for n in range(10 * part, 10 * part + 10)
        ]
        for row in rows:
            Image.fromarray(images[int(row[2])]).save(folder / row[0] / row[1])
        if as_array:
            np.save(folder / f"metadata/{part}.npy", np.array(rows))
        else:
            (folder / f"metadata/{part}.npy").write_text("".join(" ".join(row) + "\n" for row in rows) + "\n")


@pytest.mark.parametrize("kind", ["npz", "folder", "parent", "array"])
def test_images_are_read_and_split(tmp_path, images, kind):
    pixels, labels = images
    path = tmp_path / "curv_contour_length_14"
    if kind == "npz":
        path = tmp_path / "own.npz"
        np.savez(path, images=pixels.reshape(20, -1), labels=labels.astype(np.uint8))
    else:
        write_folder(path, pixels, labels, kind == "array")
    parts = read_pathfinder(tmp_path if kind == "parent" else path)
    assert {part: len(examples) for part, examples in parts.items()} == {"train": 16, "validation": 2, "test": 2}
    order = np.random.default_rng(0).permutation(20)
    read = np.concatenate([examples.values.reshape(-1, 32, 32) for examples in parts.values()])
    np.testing.assert_array_equal(read, pixels[order])
    assert [label for examples in parts.values() for label in examples.labels] == labels[order].tolist()
    assert parts["train"][0]["input_ids"].shape == (1024,)


def test_what_is_wrong_with_a_file(tmp_path, images):
    pixels, labels = images[0].reshape(20, -1), images[1]
    file = tmp_path / "own.npz"
    for arrays, message in (
        ({"images": pixels}, "cannot be read"),
        ({"images": pixels[:, :900], "labels": labels}, r"images are uint8 \(20, 900\)"),
        ({"images": np.uint8(3), "labels": labels}, r"images are uint8 \(\)"),
        ({"images": pixels / 255, "labels": labels}, "images are float64"),
        ({"images": pixels, "labels": labels[:3]}, r"labels \(3,\)"),
        ({"images": pixels, "labels": labels + 1}, "image 1 has label 2; labels are 0 and 1"),
        ({"images": pixels[:2], "labels": labels[:2]}, "has 2 images; three parts need at least 3"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(UserError, match=message) as error:
            read_pathfinder(file)
        assert str(file) in str(error.value)
    for content in (b"", b"PK\x03\x04 broken", b"text"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"own.npz cannot be read \(.*\); give an .npz"):
            read_pathfinder(file)
    with file.open("wb") as stream:
        np.save(stream, pixels)
    with pytest.raises(UserError, match=r"own.npz cannot be read \(.*\); give an .npz"):
        read_pathfinder(file)
    with pytest.raises(UserError, match="nowhere cannot be read"):
        read_pathfinder(tmp_path / "nowhere")


def test_what_is_wrong_with_a_folder(tmp_path, images):
    with pytest.raises(UserError, match="has no metadata"):
        read_pathfinder(tmp_path)
    write_folder(tmp_path, *images)
    image, metadata = tmp_path / "imgs/1/sample_12.png", tmp_path / "metadata/1.npy"
    Image.fromarray(np.zeros((16, 64), dtype=np.uint8)).save(image)
    with pytest.raises(UserError, match=r"sample_12.png has 64 x 16 pixels; images of 32 x 32 are read"):
        read_pathfinder(tmp_path)
    for content in (b"", b"\x89PNG\r\n\x1a\n"):
        image.write_bytes(content)
        with pytest.raises(UserError, match=r"sample_12.png cannot be read"):
            read_pathfinder(tmp_path)
    image.unlink()
    with pytest.raises(UserError, match=r"sample_12.png cannot be read .*No such file"):
        read_pathfinder(tmp_path)
    metadata.write_text("imgs/1 sample_10.png 10 0 1.0\nimgs/1 sample_11.png 11 2 1.0\n")
    with pytest.raises(UserError, match=r"1.npy, line 2 has label 2; give folder, file, number and a label, 0 or 1"):
        read_pathfinder(tmp_path)
    metadata.write_text("imgs/1 sample_10.png\n")
    with pytest.raises(UserError, match=r"1.npy, line 1 has 2 columns"):
        read_pathfinder(tmp_path)


def test_the_contrast_of_paddles_is_that_of_long_contours(scenes):
    made, _ = scenes
    p = replace(made.parameters, antialias_scale=1, snake_contrast=0.8)  # which is not clipped
    hidden = np.full((1, 2), -99 - 99j)
    for paddles in made.paddles[:10]:
        long, other = np.full((2, *paddles.shape), np.nan, dtype=complex)
        long[: 2 * p.contour_length], other[2 * p.contour_length :] = np.split(paddles, [2 * p.contour_length])
        darker, brighter = (Scenes(each[None], hidden, p).draw().max() for each in (long, other))
        assert darker < brighter


def test_contours_turn_less_where_they_are_more_continuous():
    p = PathfinderParameters(continuity=4.0, contour_length=4, num_distractors=0)
    contours = make_scenes(np.arange(8) % 2, np.random.default_rng(0), p).paddles.reshape(16, 4, 2)
    headings = contours[..., 1] - contours[..., 0]
    turns = np.abs(np.angle(headings[:, 1:] / headings[:, :-1]))
    assert np.pi / 16 < turns.max() <= np.pi / 2 / 4 + 1e-9


def test_contours_keep_a_gap_from_the_border(scenes):
    made, _ = scenes
    p = made.parameters
    for paddles in made.paddles:
        for contour in contours_of(paddles, p):
            behind = contour[:, 1] + p.paddle_margin * (contour[:, 1] - contour[:, 0]) / p.paddle_length
            reached = np.abs(np.stack([behind.real, behind.imag]) - p.image_size / 2)
            assert reached.max() <= p.image_size / 2 - p.padding + 1e-6
