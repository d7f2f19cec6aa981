/* Between a program and its threads, processes and memory: count the requests of one kind, and let one of them fail.
 *
 * Preloaded (LD_PRELOAD), it does nothing until starts_arm(), or GPT2LAB_STARTS in the environment of a program that an
 * armed one starts. The count is a file that all of them map. disk.py compiles it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREAD, PROCESS, MEMORY };
static long *count, fail_at;
static int kind = -1;
static size_t least; /* bytes of a request for memory that counts */

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

/* The request number `at` (from 1; 0: none) of a kind fails; `path` is a file of at least 8 bytes. */
void starts_arm(const char *path, int of, long at, long bytes) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    fail_at = at, least = bytes, kind = of;
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("GPT2LAB_STARTS");
    char path[4096];
    int of;
    long at, bytes;
    if (text && sscanf(text, "%d %ld %ld %4095[^\n]", &of, &at, &bytes, path) == 4)
        starts_arm(path, of, at, bytes);
}

static int fails(int of, int error) {
    if (of != kind || __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST) != fail_at)
        return 0;
    errno = error;
    return 1;
}

static int is_refused(size_t bytes) {
    return bytes >= least && fails(MEMORY, ENOMEM);
}

int pthread_create(pthread_t *id, const pthread_attr_t *how, void *(*act)(void *), void *with) {
    __typeof__(&pthread_create) real = dlsym(RTLD_NEXT, "pthread_create");
    return fails(THREAD, EAGAIN) ? EAGAIN : real(id, how, act, with);
}

static __thread int is_second; /* after a vfork that failed, Python tries fork */

pid_t fork(void) {
    pid_t (*real)(void) = dlsym(RTLD_NEXT, "fork");
    if (is_second) {
        errno = EAGAIN;
        return is_second = 0, -1;
    }
    return fails(PROCESS, EAGAIN) ? -1 : real();
}

pid_t vfork(void) { /* a function around the real one would return twice */
    pid_t child = fork();
    is_second = child < 0;
    return child;
}

void *malloc(size_t bytes) {
    return is_refused(bytes) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t number, size_t bytes) {
    return is_refused(number * bytes) ? NULL : __libc_calloc(number, bytes);
}

void *realloc(void *old, size_t bytes) {
    return is_refused(bytes) ? NULL : __libc_realloc(old, bytes);
}

void *memalign(size_t unit, size_t bytes) {
    return is_refused(bytes) ? NULL : __libc_memalign(unit, bytes);
}

void *aligned_alloc(size_t unit, size_t bytes) {
    return memalign(unit, bytes);
}

int posix_memalign(void **found, size_t unit, size_t bytes) {
    return (*found = memalign(unit, bytes)) ? 0 : ENOMEM;
}

void *mmap(void *at, size_t bytes, int allowed, int flags, int fd, off_t offset) {
    if ((flags & MAP_ANONYMOUS) && is_refused(bytes)) /* of Python, for its small objects */
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, bytes, allowed, flags, fd, offset);
}
