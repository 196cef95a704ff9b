/* A Vulkan driver with little memory: LD_PRELOAD it, and allocations beyond SMALL_CARD_MIB fail as a full card's do.
 *
 * gcc -shared -fPIC -O1 -o small_card.so small_card.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*lookup)(void *, const char *);
/* VkMemoryAllocateInfo begins: type, next, allocationSize. */
struct request { uint32_t type; const void *next; uint64_t size; };
typedef int32_t (*allocate)(void *, const struct request *, const void *, uint64_t *);
typedef void (*release)(void *, uint64_t, const void *);

enum { OUT_OF_DEVICE_MEMORY = -2, KEPT = 4096 };

static allocate real_allocate;
static release real_release;
static lookup real_instance, real_device;
static struct { uint64_t handle, size; } held[KEPT];

static uint64_t in_use(void) {
    uint64_t sum = 0;
    for (int i = 0; i < KEPT; i++) sum += held[i].size;
    return sum;
}

static int32_t small_allocate(void *device, const struct request *wanted, const void *with, uint64_t *handle) {
    const char *limit = getenv("SMALL_CARD_MIB");
    if (limit && in_use() + wanted->size > strtoull(limit, 0, 10) << 20) return OUT_OF_DEVICE_MEMORY;
    int32_t result = real_allocate(device, wanted, with, handle);
    for (int i = 0; result == 0 && i < KEPT; i++)
        if (!held[i].size) { held[i].handle = *handle; held[i].size = wanted->size; break; }
    return result;
}

static void small_release(void *device, uint64_t handle, const void *with) {
    for (int i = 0; i < KEPT; i++)
        if (held[i].size && held[i].handle == handle) { held[i].size = 0; break; }
    real_release(device, handle, with);
}

static function device_lookup(void *device, const char *name);

static function ours(const char *name, function found) {
    if (!found) return found;
    if (!strcmp(name, "vkAllocateMemory")) { real_allocate = (allocate)found; return (function)small_allocate; }
    if (!strcmp(name, "vkFreeMemory")) { real_release = (release)found; return (function)small_release; }
    if (!strcmp(name, "vkGetDeviceProcAddr")) { real_device = (lookup)found; return (function)device_lookup; }
    return found;
}

static function device_lookup(void *device, const char *name) { return ours(name, real_device(device, name)); }

function vkGetInstanceProcAddr(void *instance, const char *name) {
    if (!real_instance) real_instance = (lookup)dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    if (!real_instance) {
        void *library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_GLOBAL);
        real_instance = library ? (lookup)dlsym(library, "vkGetInstanceProcAddr") : 0;
    }
    return real_instance ? ours(name, real_instance(instance, name)) : 0;
}
