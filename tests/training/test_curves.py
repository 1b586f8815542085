"""The picture of a run has every loss of its history, and nothing else."""

from matplotlib.figure import Figure

from specattn.training.curves import draw_losses


def test_lines_and_dots(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    history = [
        {"step": 1, "loss": 3.0, "loss_1": 1.0, "loss_2": 2.0, "learning_rate": 0.1},
        {"step": 2, "loss": 2.0, "loss_1": 0.5, "loss_2": 1.5, "token_loss_1": 0.7},
        {"step": 2, "eval_loss": 2.5, "eval_loss_1": 1.0, "eval_accuracy_1": 0.5},
        {"step": 2, "eval_token_loss_1": 0.8},
        {"step": 2, "train_loss": 2.5},
    ]
    draw_losses(history, tmp_path / "loss.png")
    lines = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    assert {name: line.get_xydata().tolist() for name, line in lines.items()} == {
        "loss": [[1, 3.0], [2, 2.0]],
        "loss 1": [[1, 1.0], [2, 0.5]],
        "loss 2": [[1, 2.0], [2, 1.5]],
        "token loss 1": [[2, 0.7]],
        "loss, held out": [[2, 2.5]],
        "loss 1, held out": [[2, 1.0]],
        "token loss 1, held out": [[2, 0.8]],
    }
    assert lines["loss 1"].get_color() == lines["loss 1, held out"].get_color()
    assert lines["loss 1"].get_color() != lines["loss 2"].get_color()
