"""Settings: sources and their order, unknown and unread keys, secrets."""

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from hal.errors import SettingsError
from hal.plugins.listing import PluginEntry
from hal.settings import Settings
from hal.settings_sections import PluginSettings, SelectionSettings, SettingsCatalogue
from hal.settings_text import text_to_value


class AcmeSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int = Field(default=8000, ge=0, le=65535, description="the port")
    ratio: float = 0.5
    is_fast: bool = False
    mode: Literal[8, 16, "auto"] = "auto"
    names: tuple[str, ...] = ()
    folder: Path | None = None
    api_key: SecretStr | None = None


@pytest.fixture
def catalogue() -> SettingsCatalogue:
    catalogue = SettingsCatalogue()
    catalogue.register("acme", AcmeSettings)
    return catalogue


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "hal.toml"


def acme(settings: Settings) -> AcmeSettings:
    return settings.section("acme", AcmeSettings, consumer="test")


def test_later_sources_win_key_by_key(catalogue: SettingsCatalogue, config: Path) -> None:
    config.write_text('[acme]\nport = 1\nratio = 0.25\nis_fast = true\nnames = ["a", "b"]\n')
    settings = Settings.read(
        catalogue=catalogue,
        environment={"HAL_CONFIG": str(config), "HAL_ACME_PORT": "2", "HAL_ACME_RATIO": "0.75"},
        flags={"acme.port": ("--port", 3)},
    )
    section = acme(settings)
    assert (section.port, section.ratio, section.is_fast) == (3, 0.75, True)
    assert section.names == ("a", "b")
    sources = {row.key: row.source for row in settings.rows()}
    assert sources["acme.port"] == "--port"
    assert sources["acme.ratio"] == "HAL_ACME_RATIO"
    assert sources["acme.is_fast"] == str(config)
    assert sources["acme.mode"] == "default"


def test_text_of_every_kind_of_field(catalogue: SettingsCatalogue) -> None:
    environment = {
        "HAL_ACME_PORT": "80",
        "HAL_ACME_RATIO": "1e-3",
        "HAL_ACME_IS_FAST": "yes",
        "HAL_ACME_MODE": "16",
        "HAL_ACME_NAMES": "x, y",
        "HAL_ACME_FOLDER": "/somewhere",
        "HAL_SELECTION_USE": "attention.decode=cpu.a,gemm=cpu.b",
        "HAL_PLUGINS_DISABLE": '["one"]',
    }
    settings = Settings.read(catalogue=catalogue, environment=environment)
    assert acme(settings) == AcmeSettings(
        port=80, ratio=1e-3, is_fast=True, mode=16, names=("x", "y"), folder=Path("/somewhere")
    )
    selection = settings.section("selection", SelectionSettings, consumer="test")
    assert selection.use == {"attention.decode": "cpu.a", "gemm": "cpu.b"}
    plugins = settings.section("plugins", PluginSettings, consumer="test")
    assert plugins.disable == ("one",)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HAL_ACME_PROT": "1"}, ["HAL_ACME_PROT", "did you mean 'HAL_ACME_PORT'"]),
        ({"HAL_ACEM_PORT": "1"}, ["HAL_ACEM_PORT", "did you mean 'HAL_ACME_PORT'"]),
        ({"HAL_CONFIGG": "x"}, ["HAL_CONFIGG", "did you mean 'HAL_CONFIG'"]),
        ({"HAL_ACME_PORT": "many"}, ["acme.port (HAL_ACME_PORT)", "'many'", "the port"]),
        ({"HAL_ACME_PORT": "70000"}, ["acme.port (HAL_ACME_PORT)", "65535"]),
        ({"HAL_ACME_PORT": "8_0"}, ["acme.port (HAL_ACME_PORT)"]),
        ({"HAL_ACME_MODE": "32"}, ["acme.mode (HAL_ACME_MODE)"]),
        ({"HAL_ACME_RATIO": "half"}, ["acme.ratio (HAL_ACME_RATIO)"]),
        ({"HAL_ACME_IS_FAST": "maybe"}, ["acme.is_fast (HAL_ACME_IS_FAST)"]),
        ({"HAL_SELECTION_USE": "gemm"}, ["selection.use (HAL_SELECTION_USE)"]),
        ({"HAL_PLUGINS_PROBE_DEADLINE_S": "2"}, ["plugins.probe_deadline_s", "15"]),
        ({"HAL_PLUGINS_PROBE_MEMORY_MB": "64"}, ["plugins.probe_memory_mb", "256"]),
        ({"HAL_CONFIG": "/nowhere/hal.toml"}, ["/nowhere/hal.toml"]),
    ],
)
def test_bad_environment(
    catalogue: SettingsCatalogue, environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.read(catalogue=catalogue, environment=environment).rows()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[acme]\nprot = 1", ["acme.prot", "hal.toml", "did you mean 'port'"]),
        ("[acne]\nport = 1", ["'acne'", "did you mean 'acme'"]),
        ('[acme]\nport = "1"', ["acme.port", "valid integer"]),
        ("[acme]\nport = true", ["acme.port", "valid integer"]),
        ("[acme]\nport = 1.0", ["acme.port", "valid integer"]),
        ("[acme]\nratio = nan\nport = -1", ["acme.port"]),
        ("acme = 1", ["'acme'", "a table [acme]"]),
        ("[acme\n", ["TOML"]),
    ],
)
def test_bad_file(catalogue: SettingsCatalogue, config: Path, text: str, words: list[str]) -> None:
    config.write_text(text)
    with pytest.raises(SettingsError) as caught:
        Settings.read(catalogue=catalogue, config=config, environment={}).rows()
    for word in words:
        assert word in str(caught.value)


def test_unread_settings_are_errors(catalogue: SettingsCatalogue, config: Path) -> None:
    config.write_text("[acme]\nport = 1\n")
    settings = Settings.read(catalogue=catalogue, config=config, environment={})
    settings.check_consumed()  # another command's section of a shared file
    with pytest.raises(SettingsError, match=r"acme\.port \(.*hal\.toml\)"):
        settings.check_consumed(["acme"])
    acme(settings)
    settings.check_consumed(["acme"])
    flagged = Settings.read(
        catalogue=catalogue, environment={}, flags={"plugins.disable": ("--set", "x")}
    )
    with pytest.raises(SettingsError, match=r"plugins\.disable \(--set\)"):
        flagged.check_consumed()
    flagged = Settings.read(
        catalogue=catalogue, environment={}, flags={"acne.port": ("--set acne.port", "1")}
    )
    with pytest.raises(SettingsError, match="did you mean 'acme'"):
        flagged.check_consumed()


def test_secrets_are_never_shown(catalogue: SettingsCatalogue, config: Path) -> None:
    secret = "correct-horse"
    config.write_text(f'[acme]\napi_key = "{secret}"\n')
    settings = Settings.read(catalogue=catalogue, config=config, environment={})
    key = acme(settings).api_key
    assert key is not None
    assert key.get_secret_value() == secret
    assert secret not in repr(settings.rows())
    config.write_text('[acme]\napi_key = ["correct-horse"]\n')
    with pytest.raises(SettingsError) as caught:
        acme(Settings.read(catalogue=catalogue, config=config, environment={}))
    assert "acme.api_key" in str(caught.value)
    assert secret not in str(caught.value)


def test_two_models_for_one_section(catalogue: SettingsCatalogue) -> None:
    catalogue.register("acme", AcmeSettings)
    with pytest.raises(SettingsError, match="acme"):
        catalogue.register("acme", PluginSettings)


def entry(distribution: str, section: str, value: str) -> PluginEntry:
    return PluginEntry(distribution, section, value, "1.0")


def test_sections_of_other_packages_are_imported_on_demand_only() -> None:
    catalogue = SettingsCatalogue(
        [
            entry("good", "good", "hal.settings_sections:PluginSettings"),
            entry("x", "bad", "no.such"),
        ]
    )
    assert catalogue.names == ("bad", "good", "plugins", "selection")
    assert catalogue.model("good") is PluginSettings
    with pytest.raises(SettingsError, match=r"'bad' of x 1\.0"):
        catalogue.model("bad")
    catalogue = SettingsCatalogue([entry("x", "odd", "json:loads")])
    with pytest.raises(SettingsError, match="pydantic model at json:loads"):
        catalogue.model("odd")


def test_a_section_has_one_owner() -> None:
    rivals = [
        entry("one", "acme", "a:A"),
        entry("two", "acme", "b:B"),
        entry("x", "plugins", "c:C"),
    ]
    catalogue = SettingsCatalogue(rivals)
    with pytest.raises(SettingsError, match=r"one .*and two "):
        catalogue.model("acme")
    with pytest.raises(SettingsError, match="hal itself"):
        catalogue.model("plugins")


@given(st.integers(-(10**20), 10**20))
def test_integers_survive_text(number: int) -> None:
    assert text_to_value(int | None, str(number)) == number


@given(st.dictionaries(st.text("abc.", min_size=1), st.text("xyz_", min_size=1)))
def test_mappings_survive_both_forms(mapping: dict[str, str]) -> None:
    plain = ",".join(f"{key}={value}" for key, value in mapping.items())
    assert text_to_value(dict[str, str], plain) == mapping
    assert text_to_value(dict[str, str], json.dumps(mapping)) == mapping


@given(st.text(max_size=40))
def test_any_text_is_read_or_left_alone(text: str) -> None:
    for annotation in (int, float, bool, str, tuple[int, ...], dict[str, str], Literal[1, "a"]):
        text_to_value(annotation, text)
