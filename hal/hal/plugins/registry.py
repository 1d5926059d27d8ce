"""The devices of a host and the plug-ins that answer for them."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from hal.candidates import KernelCandidate
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec, SelfTestResult
from hal.errors import DeviceClaimError, DeviceNotFoundError, PluginError
from hal.hookspecs import Runtime
from hal.host import TransferableHost
from hal.ops import CATALOGUE
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.newer_arguments import guarded
from hal.plugins.states import PluginState
from hal.suggestions import did_you_mean

if TYPE_CHECKING:
    from hal.selection import Decision


class StateKeeper(Protocol):
    """Keeps the state of each plug-in."""

    @property
    def states(self) -> tuple[PluginState, ...]:
        """Every plug-in's state by now."""
        ...

    def record_failure(self, entry: PluginEntry, error: PluginError) -> None:
        """Remember a plug-in's failure."""
        ...

    def load_providing(self, what: str) -> tuple[Plugin, ...]:
        """Load every sound plug-in that provides `what`."""
        ...


class BackendRegistry:
    """The loaded plug-ins of a host.

    A device's own plug-in must answer: its failure is raised. A further plug-in (implementations
    for any device, observers) that fails hides nothing of the others: its failure goes into
    `failures` and into its state, which a plan and `hal doctor` show.
    """

    def __init__(
        self,
        host: TransferableHost,
        keeper: StateKeeper,
        plugins: Iterable[Plugin],
        owners: Mapping[str, tuple[DetectedDevice, Plugin]],
    ) -> None:
        self.host = host
        self.plugins = tuple(sorted(plugins, key=lambda plugin: plugin.entry))
        self._keeper = keeper
        self._owners = dict(owners)
        self._specs: dict[str, DeviceSpec] = {}
        self._failures: list[PluginError] = []
        self._profiles: dict[str, DeviceSpec] | None = None
        self._profile_owners: dict[str, Plugin] = {}
        self._contested: dict[str, DeviceClaimError] = {}

    @property
    def devices(self) -> tuple[DetectedDevice, ...]:
        """Every detected device of a loaded plug-in, sorted by id."""
        return tuple(device for device, _ in self._owners.values())

    @property
    def states(self) -> tuple[PluginState, ...]:
        """Every installed plug-in's state by now."""
        return self._keeper.states

    @property
    def failures(self) -> tuple[PluginError, ...]:
        """What further plug-ins failed at since loading."""
        return tuple(self._failures)

    def device(self, device_id: str) -> DetectedDevice:
        """The detected device of that id.

        Raises:
            DeviceNotFoundError: no loaded plug-in has detected it.
        """
        if device_id not in self._owners:
            raise DeviceNotFoundError(
                f"device {device_id!r}",
                "a detected device",
                f"{', '.join(self._owners) or 'no device at all'}",
                f"{did_you_mean(device_id, self._owners)} `hal doctor` shows every plug-in",
            )
        return self._owners[device_id][0]

    def plugin_for(self, device: DeviceSpec | DetectedDevice) -> Plugin:
        """The plug-in that answers for a device: the one that detected it or knows its profile,
        else for a device that is not on this host the loaded plug-in named by its `backend`.

        Raises:
            DeviceNotFoundError: there is none.
        """
        if device.device_id in self._owners:
            owner = self._owners[device.device_id][1]
            if isinstance(device, DetectedDevice) or device.backend == owner.info.name:
                return owner
        backend = device.backend if isinstance(device, DeviceSpec) else ""
        knowing = self._profile_owners.get(device.device_id)
        if knowing is not None and knowing.info.name == backend:
            return knowing
        for plugin in self.plugins:
            if plugin.info.name == backend:
                return plugin
        names = [plugin.info.name for plugin in self.plugins]
        raise DeviceNotFoundError(
            f"device {device.device_id!r}",
            f"a loaded plug-in named {backend!r}" if backend else "a plug-in that detected it",
            f"loaded: {', '.join(names) or 'none'}",
            f"select the plug-in, or see `hal doctor`; {did_you_mean(backend, names)}",
        )

    def describe(self, device_id: str) -> DeviceSpec:
        """What a detected device can do; asked for once.

        Raises:
            DeviceNotFoundError: no such device.
            PluginError: its plug-in cannot describe it.
        """
        if device_id not in self._specs:
            device = self.device(device_id)
            self._specs[device_id] = self.plugin_for(device).describe_device(device, self.host)
        return self._specs[device_id]

    @property
    def profiles(self) -> Mapping[str, DeviceSpec]:
        """Every device that one plug-in knows and that need not be here, by name. A name that two
        know means neither of them, and hides no other.

        Loads the plug-ins that have devices: only a plan for an absent device asks for this.
        """
        if self._profiles is None:
            loaded = {plugin.entry: plugin for plugin in self.plugins}
            loaded |= {plugin.entry: plugin for plugin in self._keeper.load_providing("devices")}
            self.plugins = tuple(loaded[entry] for entry in sorted(loaded))
            found: dict[str, tuple[DeviceSpec, Plugin]] = {}
            for plugin in self.plugins:
                for spec in self._profiles_of(plugin):
                    name = spec.device_id
                    if name in found:
                        twice = _one_profile_twice(spec, found[name][1], plugin)
                        self._contested.setdefault(name, twice)
                    found.setdefault(name, (spec, plugin))
            kept = [name for name in sorted(found) if name not in self._contested]
            self._profiles = {name: found[name][0] for name in kept}
            self._profile_owners = {name: found[name][1] for name in kept}
        return self._profiles

    def profile(self, name: str) -> DeviceSpec:
        """The profile of a device that need not be here.

        Raises:
            DeviceNotFoundError: no plug-in knows it.
            DeviceClaimError: two plug-ins know a device by this name.
        """
        if name not in self.profiles:
            if name in self._contested:
                raise self._contested[name]
            found = f"here: {', '.join(self._owners) or 'none'}; known: {len(self.profiles)} others"
            if self._failures:
                first = self._failures[0]
                found += f"; {len(self._failures)} plug-ins failed, so that more may be known: "
                found += f"{first.required}: {first.found}"
            raise DeviceNotFoundError(
                f"device {name!r}",
                "a device of this host, or one that a plug-in knows",
                found,
                f"{did_you_mean(name, [*self._owners, *self.profiles])} "
                "`hal db list` shows what is known",
            )
        return self.profiles[name]

    def candidates(self, op: str, device: DeviceSpec) -> tuple[KernelCandidate, ...]:
        """Every implementation of `op` for `device`, sorted by name: those of its own plug-in and
        of plug-ins that provide candidates for any device.

        Raises:
            PluginError: the device's own plug-in fails, or two plug-ins use one candidate name.
        """
        owner = self.plugin_for(device)
        family = CATALOGUE.get(op)
        found: dict[str, KernelCandidate] = {}
        for plugin in self.plugins:
            if plugin is not owner and "candidates" not in plugin.info.provides:
                continue
            for offered in self._candidates_of(plugin, owner, op, device):
                candidate = guarded(offered, family, plugin.info.api_range) if family else offered
                if candidate.name in found:
                    raise _one_name_twice(found[candidate.name], candidate, plugin)
                found[candidate.name] = candidate
        return tuple(found[name] for name in sorted(found))

    def policy(self, device: DeviceSpec) -> DevicePolicy:
        """What the device's own plug-in forces on or disables."""
        return self.plugin_for(device).device_policy(device)

    def create_runtime(self, device: DeviceSpec) -> Runtime:
        """The device made usable in this process."""
        return self.plugin_for(device).create_runtime(device)

    def measure(self, device: DeviceSpec) -> DeviceSpec:
        """The device with measured rates."""
        return self.plugin_for(device).measure_device(device)

    def self_test(self, device: DeviceSpec, runtime: Runtime) -> tuple[SelfTestResult, ...]:
        """Golden-value checks of the device's runtime."""
        return self.plugin_for(device).self_test(runtime)

    def decision_made(self, decision: "Decision") -> None:
        """Show a decision to every loaded plug-in."""
        for plugin in self.plugins:
            try:
                plugin.decision_made(decision)
            except PluginError as error:
                self._record(plugin, error)

    def _profiles_of(self, plugin: Plugin) -> tuple[DeviceSpec, ...]:
        try:
            return plugin.device_profiles()
        except PluginError as error:
            self._record(plugin, error)
            return ()

    def _candidates_of(
        self, plugin: Plugin, owner: Plugin, op: str, device: DeviceSpec
    ) -> tuple[KernelCandidate, ...]:
        try:
            return plugin.kernel_candidates(op, device)
        except PluginError as error:
            if plugin is owner:
                raise
            self._record(plugin, error)
            return ()

    def _record(self, plugin: Plugin, error: PluginError) -> None:
        self._failures.append(error)
        self._keeper.record_failure(plugin.entry, error)


def _one_name_twice(first: KernelCandidate, second: KernelCandidate, plugin: Plugin) -> PluginError:
    return PluginError(
        f"candidate {first.name}",
        "one distribution that offers it",
        f"offered by {first.distribution} and by {second.distribution}",
        f'disable one of them: plugins.disable = ["{plugin.entry.key}"]',
    )


def _one_profile_twice(spec: DeviceSpec, first: Plugin, second: Plugin) -> DeviceClaimError:
    return DeviceClaimError(
        f"device profile {spec.device_id!r}",
        "one plug-in that knows it",
        f"known by {first.entry} and by {second.entry}",
        f'disable one of them: plugins.disable = ["{second.entry.key}"]',
    )
