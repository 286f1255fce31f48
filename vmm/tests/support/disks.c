/* The guest of guest_disks.rs uses its disks by `disks load DISK`, `disks watch DISK`,
 * `disks files DIR`. It reports success as `WHAT DISK ok`, and errors as `bad WHAT`. Built
 * with `gcc -static`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/fs.h>

#define BLOCK 4096
#define PIECE (32 * BLOCK)
#define DEPTH 32    /* processes, each with one request in flight */
#define ROUNDS 16   /* of random writes and reads, by each of them */
#define LAST 12     /* the number of the last medium */
#define FILES 1000
#define LONGEST 65536

static void bad(const char *what)
{
    printf("bad %s: %s\n", what, strerror(errno));
    exit(1);
}

static void wrong(const char *what)
{
    errno = 0;
    bad(what);
}

static uint64_t mixed(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}

static void fill(void *bytes, size_t count, uint64_t seed)
{
    uint64_t *words = bytes;

    for (size_t n = 0; n < count / 8; n++)
        words[n] = mixed(seed + n);
}

static char found[PIECE] __attribute__((aligned(BLOCK)));
static char wanted[PIECE] __attribute__((aligned(BLOCK)));

static void put(int fd, uint64_t at, size_t bytes)
{
    if (pwrite(fd, wanted, bytes, at) != (ssize_t)bytes)
        bad("write");
}

static void expect(int fd, uint64_t at, size_t bytes)
{
    if (pread(fd, found, bytes, at) != (ssize_t)bytes)
        bad("read");
    if (memcmp(found, wanted, bytes))
        wrong("contents");
}

static int open_disk(const char *path, int flags, uint64_t *size)
{
    int fd = open(path, flags | O_DIRECT);

    if (fd < 0 || ioctl(fd, BLKGETSIZE64, size))
        bad("disk");
    return fd;
}

/* Runs `DEPTH` processes, on all CPUs, and so over all queues. */
static void at_once(void (*job)(const char *, int), const char *path)
{
    int cpus = sysconf(_SC_NPROCESSORS_ONLN), status;

    for (int n = 0; n < DEPTH; n++)
        if (fork() == 0) {
            cpu_set_t own;
            CPU_ZERO(&own);
            CPU_SET(n % cpus, &own);
            if (sched_setaffinity(0, sizeof(own), &own))
                bad("CPU");
            job(path, n);
            _exit(0);
        }
    for (int n = 0; n < DEPTH; n++)
        if (wait(&status) < 0 || status)
            wrong("process");
}

/* Writes and reads a part of a disk: at random, and then from its start to its end. The final
 * content of each block follows from its position. */
static void load(const char *path, int part)
{
    static uint64_t seeds[1 << 16]; /* of the content of each block; 0: the initial content */
    uint64_t size;
    int fd = open_disk(path, O_RDWR, &size);
    uint64_t len = size / DEPTH / PIECE * PIECE, start = part * len, blocks = len / BLOCK;

    for (uint64_t round = 1; round <= ROUNDS; round++) {
        uint64_t random = mixed(part << 16 | round), block = random % blocks;
        uint64_t count = 1 + (random >> 32) % 8;
        if (count > blocks - block)
            count = blocks - block;
        for (uint64_t n = 0; n < count; n++)
            fill(wanted + n * BLOCK, BLOCK, seeds[block + n] = mixed(random + n) | 1);
        put(fd, start + block * BLOCK, count * BLOCK);
        if (round % 16 == 0 && fdatasync(fd))
            bad("flush");
        block = (random >> 16) % blocks;
        if (seeds[block]) {
            fill(wanted, BLOCK, seeds[block]);
            expect(fd, start + block * BLOCK, BLOCK);
        }
    }
    for (int pass = 0; pass < 2; pass++)
        for (uint64_t at = start; at < start + len; at += PIECE) {
            fill(wanted, PIECE, mixed(at));
            if (pass == 0)
                put(fd, at, PIECE);
            else
                expect(fd, at, PIECE);
        }
}

/* Reads blocks at random until they are the last medium's: each must be of a single medium, and not
 * of an earlier one. A block's words contain the medium's number and its own. */
static void watch(const char *path, int part)
{
    uint64_t size, medium = 0;
    int fd = open_disk(path, O_RDONLY, &size);

    for (uint64_t round = 0; medium < LAST; round++) {
        uint64_t block = mixed(part << 24 | round) % (size / BLOCK), *words = (void *)found;
        if (pread(fd, found, BLOCK, block * BLOCK) != BLOCK)
            bad("read");
        if (words[0] >> 32 < medium)
            wrong("medium, which is an old one");
        medium = words[0] >> 32;
        for (int n = 0; n < BLOCK / 8; n++)
            if (words[n] != (medium << 32 | block))
                wrong("block of two media");
    }
}

/* Writes files that are synced, and reports each then, and others that are created and removed. */
static void files(const char *dir)
{
    int here, fd;
    char name[32];

    if (chdir(dir) || (here = open(".", O_RDONLY)) < 0)
        bad("directory");
    if (fork() == 0)
        for (uint64_t n = 0;; n++) {
            snprintf(name, sizeof(name), "other%d", (int)(n % 50));
            fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
            fill(wanted, 8192, n);
            if (fd < 0 || write(fd, wanted, 8192) != 8192 || close(fd))
                bad("other file");
            if (n % 3 == 0)
                rename(name, "renamed");
            if (n % 7 == 0)
                unlink(name);
            usleep(1000);
        }
    for (uint64_t n = 1; n <= FILES; n++) {
        size_t bytes = mixed(n) % LONGEST / 8 * 8;
        snprintf(name, sizeof(name), "file%d", (int)n);
        fd = open(name, O_WRONLY | O_CREAT | O_EXCL, 0644);
        fill(wanted, bytes, n);
        if (fd < 0 || write(fd, wanted, bytes) != (ssize_t)bytes || fsync(fd) || close(fd))
            bad("file");
        if (fsync(here))
            bad("directory's flush");
        printf("synced %s %d end\n", dir, (int)n);
        fflush(stdout);
    }
}

int main(int count, char **words)
{
    if (count != 3)
        wrong("arguments");
    if (!strcmp(words[1], "load"))
        at_once(load, words[2]);
    else if (!strcmp(words[1], "watch"))
        at_once(watch, words[2]);
    else
        files(words[2]);
    printf("%s %s ok\n", words[1], words[2]);
    return 0;
}
