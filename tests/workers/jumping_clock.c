/* LD_PRELOAD: the wall clock is off by as many seconds as the file $CLOCK_OFFSET says in 8 bytes; it can change at any
 * time. The monotonic clocks stay as they are, as they do when an administrator or NTP sets the time of a machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = file < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    offset = at == MAP_FAILED ? NULL : at;
}

static int64_t shift(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t id, struct timespec *out) {
    static int (*plain)(clockid_t, struct timespec *);
    if (!plain) plain = dlsym(RTLD_NEXT, "clock_gettime");
    int code = plain(id, out);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)) out->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    static int (*plain)(struct timeval *, void *);
    if (!plain) plain = dlsym(RTLD_NEXT, "gettimeofday");
    int code = plain(out, zone);
    if (code == 0) out->tv_sec += shift();
    return code;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
