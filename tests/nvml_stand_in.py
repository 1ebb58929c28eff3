"""GPUs that are not there: a stand-in for NVIDIA's Python module, and one for the library under it.

Figures are those that others have published of their GPUs, with the source beside each.
"""

import dataclasses
import types


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


@dataclasses.dataclass
class Device:
    name: str = "Tesla T4"
    uuid: str = "GPU-99"
    memory_mib: int = 15360
    used_mib: int = 3
    gens: tuple = (3, 3)
    lanes: tuple = (16, 16)
    mode: int = 0
    mig: int | None = None
    # Where each NVLink ends: the place of a GPU, "switch", or None for an inactive one.
    links: tuple = ()
    link_mbps: int = 25000
    percent: int | None = 50
    milliwatts: int | None = 100_000


# https://github.com/utkuozdemir/nvidia_gpu_exporter, samples/sample-output.csv
RTX_2080_SUPER = Device(
    "NVIDIA GeForce RTX 2080 SUPER",
    "GPU-df6e7a7c-7314-46f8-abc4-b88b36dcf3aa",
    memory_mib=8192,
    used_mib=876,
)
# https://github.com/joorklee/p2p-bench, docs/evidence.md (C16)
RTX_5060_TI = Device("NVIDIA GeForce RTX 5060 Ti", gens=(1, 3), lanes=(4, 16))
A100 = "NVIDIA A100-SXM4-80GB"


def a100(other, mig=0):
    """https://github.com/NVIDIA/nccl-tests/issues/228; MIG: https://github.com/Syllo/nvtop/pull/470"""
    return Device(A100, memory_mib=81920, mig=mig, links=(other,) * 12)


# https://github.com/Azure/azhpc-diagnostics/issues/73
V100 = Device(
    "Tesla V100-SXM2-32GB", links=("switch",) * 3 + (None, "switch", None), link_mbps=25781
)


class Nvml:
    """In place of `pynvml`.

    Args:
        devices: The GPUs.
        levels: What lies between two GPUs, by their places, as NVML numbers it; 30 elsewhere.
        fault: What keeps it from starting.
    """

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    nvmlMemory_v2 = 0x02000028
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    PART = Device(memory_mib=10_000, used_mib=8_000, percent=None, milliwatts=None)

    def __init__(self, *devices, levels=None, fault=None):
        self._devices, self._levels, self._fault = devices, levels or {}, fault
        self.is_open = False

    def nvmlInit(self):
        if self._fault is not None:
            raise self._fault
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlSystemGetDriverVersion(self):
        # https://github.com/geerlingguy/raspberry-pi-pcie-devices/issues/790
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetCount(self):
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-cccc-3":
            raise NVMLError("Not Found")
        return "part"

    def _of(self, handle):
        return self.PART if handle == "part" else self._devices[handle]

    def _known(self, value):
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def nvmlDeviceGetName(self, handle):
        return self._of(handle).name

    def nvmlDeviceGetUUID(self, handle):
        return self._of(handle).uuid

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        if version is not None:
            raise NVMLError("Function Not Found")
        device = self._of(handle)
        return types.SimpleNamespace(used=device.used_mib << 20, total=device.memory_mib << 20)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=self._known(self._of(handle).percent))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._known(self._of(handle).milliwatts)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return self._of(handle).gens[0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return self._of(handle).gens[1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self._of(handle).lanes[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return self._of(handle).lanes[1]

    def nvmlDeviceGetComputeMode(self, handle):
        return self._of(handle).mode

    def nvmlDeviceGetMigMode(self, handle):
        return [self._known(self._of(handle).mig), 0]

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetFieldValues(self, handle, fields):
        value = types.SimpleNamespace(uiVal=self._of(handle).link_mbps)
        return [types.SimpleNamespace(nvmlReturn=0, value=value) for _ in fields]

    def _end(self, handle, link):
        links = self._of(handle).links
        if link >= len(links):
            raise NVMLError("Invalid Argument")
        return links[link]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return int(self._end(handle, link) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self._end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        end = self._known(self._end(handle, link))
        return self.nvmlDeviceGetPciInfo(99 if end == "switch" else end)

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return self._levels.get((first, second), 30)


# It takes the place of NVIDIA's library under nvidia-ml-py itself.
LIBRARY = """
#include <stdio.h>
#include <string.h>
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned field, scope; long long when, took; int type, code;
                 unsigned long long value; } Field;
static int devices[2];
static int place(void *d) { return d == &devices[1]; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Not Supported"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "610.57.04"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13030; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = &devices[i]; return 0; }
int nvmlDeviceGetName(void *d, char *text, unsigned size) { strcpy(text, "Tesla T4"); return 0; }
int nvmlDeviceGetUUID(void *d, char *text, unsigned size) {
    strcpy(text, place(d) ? "GPU-bbbb" : "GPU-aaaa"); return 0; }
int nvmlDeviceGetUtilizationRates(void *d, Utilization *u) { u->gpu = 97; u->memory = 5; return 0; }
int nvmlDeviceGetMemoryInfo(void *d, Memory *m) {
    m->total = 80000000000ull; m->used = 20000000000ull; m->free = m->total - m->used; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *d, Memory2 *m) {
    if (m->version != 0x02000028) return 2;
    m->total = 80000000000ull; m->reserved = 400000000ull;
    m->used = 19600000000ull; m->free = 60000000000ull; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *milliwatts) {
    if (place(d)) return 3; *milliwatts = 321000; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *n) { *n = 4; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *n) { *n = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *n) { *n = 16; return 0; }
int nvmlDeviceGetComputeMode(void *d, unsigned *mode) { *mode = 3; return 0; }
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) { *now = *later = 1; return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, Pci *p) {
    sprintf(p->bus_id, "00000000:0%d:00.0", place(d)); return 0; }
int nvmlDeviceGetFieldValues(void *d, int count, Field *f) {
    f->code = 0; f->value = 25781; return 0; }
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *active) {
    if (link > 2) return 2; *active = link < 2; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, unsigned *t) { *t = 0; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, Pci *p) {
    return nvmlDeviceGetPciInfo_v3(&devices[!place(d)], p); }
int nvmlDeviceGetTopologyCommonAncestor(void *d, void *e, unsigned *l) { *l = 50; return 0; }
"""
