/* Storage that fails: loaded with LD_PRELOAD, it spoils chosen calls on files below one folder.

   STORAGE_FAULTS_ROOT is that folder, STORAGE_FAULTS_LOG a file that says what was done, one line
   per fault. STORAGE_FAULTS is a plan, or storage_faults_arm(plan) is called at run time:

       KIND ACTION FIRST COUNT SEED [MATCH]

   KIND is read, write, fsync, rename or open; the FIRST matching call (from 1) and the COUNT - 1
   behind it are spoiled, all from there with COUNT 0. MATCH must be part of the path. Actions:

       flip    one bit of what is read or written is another
       cut     half of it is read, or written; a write says that it wrote all
       lose    nothing is written, synced or renamed, and success is returned
       eio, enospc, edquot, estale    the call fails
       note    nothing; the log counts the calls
*/

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { READ, WRITE, FSYNC, RENAME, OPEN, NUM_KINDS };
static const char *const KINDS[] = {"read", "write", "fsync", "rename", "open"};

enum action { NONE, FLIP, CUT, LOSE, NOTE, FAIL };
static const struct { const char *name; enum action action; int error; } ACTIONS[] = {
    {"flip", FLIP, 0},       {"cut", CUT, 0},           {"lose", LOSE, 0},
    {"note", NOTE, 0},       {"eio", FAIL, EIO},        {"enospc", FAIL, ENOSPC},
    {"edquot", FAIL, EDQUOT}, {"estale", FAIL, ESTALE},
};
enum { NUM_ACTIONS = sizeof ACTIONS / sizeof *ACTIONS };

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int kind, row; /* of ACTIONS; -1: no plan */
    long first, count, seen, done;
    unsigned seed;
    char match[PATH_MAX];
} plan = {.row = -1};
static char root[PATH_MAX];
static int log_file = -1;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Returns 0, or -1 for a text that is no plan; an empty one takes the plan away. */
int storage_faults_arm(const char *text) {
    char kind[16] = "", action[16] = "", match[PATH_MAX] = "";
    long first = 0, count = 0;
    unsigned seed = 0;
    int found = -1, row = -1;
    if (*text) {
        if (sscanf(text, "%15s %15s %ld %ld %u %4095s", kind, action, &first, &count, &seed, match) < 5)
            return -1;
        for (int i = 0; i < NUM_KINDS; i++) if (!strcmp(kind, KINDS[i])) found = i;
        for (int i = 0; i < NUM_ACTIONS; i++) if (!strcmp(action, ACTIONS[i].name)) row = i;
        if (found < 0 || row < 0) return -1;
    }
    pthread_mutex_lock(&guard);
    plan.kind = found, plan.first = first, plan.count = count, plan.seed = seed;
    plan.seen = plan.done = 0;
    strcpy(plan.match, match);
    plan.row = row;
    pthread_mutex_unlock(&guard);
    return 0;
}

/* How many calls were spoiled since the plan was made. */
long storage_faults_done(void) { return plan.done; }

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("STORAGE_FAULTS_ROOT"), *log = getenv("STORAGE_FAULTS_LOG");
    const char *text = getenv("STORAGE_FAULTS");
    if (folder && !realpath(folder, root)) abort();
    if (log && (log_file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0) abort();
    if (text && storage_faults_arm(text)) abort();
}

/* What to do with this call; *random is for the choice of a bit. Returns a row of ACTIONS, or -1. */
static int decide(enum kind kind, const char *path, unsigned *random) {
    size_t length = strlen(root);
    int row = -1, kept = errno;
    if (!length || strncmp(path, root, length) || path[length] != '/') return -1;
    pthread_mutex_lock(&guard);
    if (plan.row >= 0 && plan.kind == (int)kind && strstr(path, plan.match)) {
        long number = ++plan.seen;
        if (number >= plan.first && (!plan.count || number < plan.first + plan.count)) {
            row = plan.row;
            plan.done++;
            *random = rand_r(&plan.seed);
            if (log_file >= 0) {
                REAL(write);
                char line[PATH_MAX + 64];
                int size = snprintf(line, sizeof line, "%s %s %ld %s\n", KINDS[kind],
                                    ACTIONS[row].name, number, path);
                if (real(log_file, line, size) != size) abort();
            }
        }
    }
    pthread_mutex_unlock(&guard);
    errno = kept;
    return row;
}

static int decide_open(enum kind kind, int file, unsigned *random) {
    char name[64], path[PATH_MAX];
    if (plan.row < 0 || plan.kind != (int)kind || file == log_file) return -1;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size < 0) return -1;
    path[size] = 0;
    return decide(kind, path, random);
}

static int decide_named(enum kind kind, int folder, const char *name, unsigned *random) {
    char path[2 * PATH_MAX + 64], real_folder[PATH_MAX];
    if (plan.row < 0 || plan.kind != (int)kind) return -1;
    if (*name == '/') snprintf(path, sizeof path, "%s", name);
    else if (folder == AT_FDCWD) snprintf(path, sizeof path, "./%s", name);
    else snprintf(path, sizeof path, "/proc/self/fd/%d/%s", folder, name);
    char *slash = strrchr(path, '/');
    char last[NAME_MAX + 2];
    snprintf(last, sizeof last, "%s", slash);
    slash[slash == path] = 0;
    int kept = errno;
    if (!realpath(path, real_folder)) { errno = kept; return -1; }
    snprintf(path, sizeof path, "%s%s", real_folder, last);
    return decide(kind, path, random);
}

static int fails(int row) {
    if (row < 0 || ACTIONS[row].action != FAIL) return 0;
    errno = ACTIONS[row].error;
    return 1;
}

static void flip(void *data, size_t size, unsigned random) {
    if (size) ((unsigned char *)data)[(random >> 3) % size] ^= 1u << (random & 7);
}

/* The bytes that a spoiled write writes in place of `size` bytes from `data`; free the result. */
static void *spoiled(int row, const void *data, size_t *size, unsigned random) {
    void *copy = malloc(*size ? *size : 1);
    memcpy(copy, data, *size);
    if (ACTIONS[row].action == FLIP) flip(copy, *size, random);
    if (ACTIONS[row].action == CUT) *size /= 2;
    if (ACTIONS[row].action == LOSE) *size = 0;
    return copy;
}

static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    return size;
}

#define WRITES(file, data, size, plainly, copied) \
    do { \
        unsigned random; \
        int row = decide_open(WRITE, file, &random); \
        if (fails(row)) return -1; \
        if (row < 0 || ACTIONS[row].action == NOTE) return plainly; \
        size_t left = size; \
        void *copy = spoiled(row, data, &left, random); \
        ssize_t wrote = left ? copied : 0; \
        free(copy); \
        return wrote < 0 ? wrote : (ssize_t)(size); \
    } while (0)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    WRITES(file, data, size, real(file, data, size), real(file, copy, left));
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    WRITES(file, data, size, real(file, data, size, at), real(file, copy, left, at));
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    WRITES(file, data, size, real(file, data, size, at), real(file, copy, left, at));
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    if (plan.row < 0 || plan.kind != WRITE) return real(file, parts, count);
    size_t size = total(parts, count), at = 0;
    char *joined = malloc(size ? size : 1);
    for (int i = 0; i < count; at += parts[i++].iov_len)
        memcpy(joined + at, parts[i].iov_base, parts[i].iov_len);
    ssize_t wrote = write(file, joined, size);
    free(joined);
    return wrote;
}

/* Of `got` bytes that were read: how many are given to the caller. */
static ssize_t after_read(int row, void *data, ssize_t got, unsigned random) {
    if (row < 0 || got <= 0) return got;
    if (ACTIONS[row].action == FLIP) flip(data, got, random);
    return got;
}

/* A read that is cut asks for half: the rest comes with the next one. */
static size_t asked(int row, size_t size) {
    return row >= 0 && ACTIONS[row].action == CUT && size > 1 ? size / 2 : size;
}

#define READS(file, data, size, plainly) \
    do { \
        unsigned random; \
        int row = decide_open(READ, file, &random); \
        if (fails(row)) return -1; \
        return after_read(row, data, plainly, random); \
    } while (0)

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    READS(file, data, size, real(file, data, asked(row, size)));
}

ssize_t pread(int file, void *data, size_t size, off_t at) {
    REAL(pread);
    READS(file, data, size, real(file, data, asked(row, size), at));
}

ssize_t pread64(int file, void *data, size_t size, off64_t at) {
    REAL(pread64);
    READS(file, data, size, real(file, data, asked(row, size), at));
}

#define PLAINLY(decision, plainly) \
    do { \
        unsigned random; \
        int row = decision; \
        if (fails(row)) return -1; \
        if (row >= 0 && ACTIONS[row].action == LOSE) return 0; \
        return plainly; \
    } while (0)

int fsync(int file) {
    REAL(fsync);
    PLAINLY(decide_open(FSYNC, file, &random), real(file));
}

int fdatasync(int file) {
    REAL(fdatasync);
    PLAINLY(decide_open(FSYNC, file, &random), real(file));
}

int rename(const char *from, const char *to) {
    REAL(rename);
    PLAINLY(decide_named(RENAME, AT_FDCWD, from, &random), real(from, to));
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    PLAINLY(decide_named(RENAME, from_folder, from, &random), real(from_folder, from, to_folder, to));
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(renameat2);
    PLAINLY(decide_named(RENAME, from_folder, from, &random),
            real(from_folder, from, to_folder, to, flags));
}

#define OPENS(folder, name, flags, plainly) \
    do { \
        mode_t mode = 0; \
        if ((flags) & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        unsigned random; \
        if (fails(decide_named(OPEN, folder, name, &random))) return -1; \
        return plainly; \
    } while (0)

int open(const char *name, int flags, ...) {
    REAL(open);
    OPENS(AT_FDCWD, name, flags, real(name, flags, mode));
}

int open64(const char *name, int flags, ...) {
    REAL(open64);
    OPENS(AT_FDCWD, name, flags, real(name, flags, mode));
}

int openat(int folder, const char *name, int flags, ...) {
    REAL(openat);
    OPENS(folder, name, flags, real(folder, name, flags, mode));
}

int openat64(int folder, const char *name, int flags, ...) {
    REAL(openat64);
    OPENS(folder, name, flags, real(folder, name, flags, mode));
}
