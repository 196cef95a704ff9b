/* Preloaded into an engine on a software Vulkan device, for probes that allocate nothing; never for inference.
 *
 * Such a driver reports that a shader may see 128 MiB of a buffer, so the engine keeps every larger tensor in RAM without
 * a word. Real drivers report 4 GiB - 1. This raises that one limit in what the engine is told, so that it places and
 * counts tensors as on a real card.
 *
 *     gcc -shared -fPIC -O1 -o vkshim.so vkshim.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The beginning of VkPhysicalDeviceProperties, as far as the limit goes; the real one is longer. */
struct properties {
    uint32_t api_version, driver_version, vendor, device, kind;
    char name[256];
    uint8_t cache_id[16];
    struct {
        uint32_t image_1d, image_2d, image_3d, image_cube, image_layers, texel_elements, uniform_range, storage_range;
        uint64_t aligns_as_the_real_one;
    } limits;
};

/* VkPhysicalDeviceProperties2: the same behind the usual head of an extensible structure. */
struct properties2 {
    uint32_t type;
    void *next;
    struct properties properties;
};

typedef void (*function)(void);
typedef function (*resolver)(void *instance, const char *name);
typedef void (*describe)(void *device, struct properties *out);
typedef void (*describe2)(void *device, struct properties2 *out);

static describe real_describe;
static describe2 real_describe2;

static void lift(struct properties *properties)
{
    if (properties->limits.storage_range == UINT32_C(1) << 27)
        properties->limits.storage_range = UINT32_MAX;
}

static void describe_raised(void *device, struct properties *out)
{
    real_describe(device, out);
    lift(out);
}

static void describe2_raised(void *device, struct properties2 *out)
{
    real_describe2(device, out);
    lift(&out->properties);
}

static resolver real_resolver(void)
{
    resolver found = (resolver)dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    if (found == NULL) {
        void *loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_GLOBAL);
        found = loader == NULL ? NULL : (resolver)dlsym(loader, "vkGetInstanceProcAddr");
    }
    return found;
}

function vkGetInstanceProcAddr(void *instance, const char *name)
{
    static resolver resolve;
    if (resolve == NULL && (resolve = real_resolver()) == NULL)
        return NULL;
    function found = resolve(instance, name);
    if (found == NULL)
        return NULL;
    if (strcmp(name, "vkGetPhysicalDeviceProperties") == 0) {
        real_describe = (describe)found;
        return (function)describe_raised;
    }
    if (strcmp(name, "vkGetPhysicalDeviceProperties2") == 0 || strcmp(name, "vkGetPhysicalDeviceProperties2KHR") == 0) {
        real_describe2 = (describe2)found;
        return (function)describe2_raised;
    }
    return found;
}
