from kvtier.cli import main


def test_a_prefill_engine_needs_a_directory_to_hand_kv_over(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prefill", "--socket", str(tmp_path / "socket")]) == 2
    assert "set tiering.nvme.path" in capsys.readouterr().err


def test_a_prefill_engine_needs_a_socket(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prefill"]) == 2
    assert "--socket" in capsys.readouterr().err
