/* NVIDIA's management library on a machine with two equal cards and another: what app/nvidia.py asks of it.
 *
 * gcc -shared -fPIC -O1 -o libnvidia-ml.so.1 two_cards.c; LD_LIBRARY_PATH names its folder. Process 7 holds
 * 3 MiB of each, and of the second 10 MiB more.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CARDS = 3, INSUFFICIENT_SIZE = 7 };
static const uint64_t MIB = 1 << 20;

/* Laid out as nvml.h has them. */
typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { char legacy[16]; uint32_t domain, bus, device, id, subsystem; char address[32]; } pci_t;
typedef struct { uint32_t pid; uint64_t used; uint32_t gpu_instance, compute_instance; } process_t;

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = CARDS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t *handle) { *handle = index + 1; return 0; }

int nvmlDeviceGetName(uintptr_t handle, char *name, unsigned size) {
    snprintf(name, size, handle == CARDS ? "Other Card" : "Twin Card");
    return 0;
}

int nvmlDeviceGetMemoryInfo(uintptr_t handle, memory_t *memory) {
    *memory = (memory_t){8192 * MIB, (8192 - 100 * handle) * MIB, 100 * handle * MIB};
    return 0;
}

int nvmlDeviceGetPciInfo_v3(uintptr_t handle, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02x:00.0", (unsigned)handle);
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t handle, unsigned *count, process_t *processes) {
    if (processes == NULL) return INSUFFICIENT_SIZE;
    *count = 1;
    processes[0] = (process_t){7, handle == 2 ? 13 * MIB : 3 * MIB, 0, 0};
    return 0;
}
