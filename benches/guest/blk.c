/* The init of the block benchmark's guest: reads the first disk in three ways, all of them
 * bypassing the page cache (O_DIRECT).
 *
 *   single      4 KiB at random, one at a time
 *   eight       4 KiB at random, eight in flight (io_submit): as many as have completed are
 *               submitted again, by one call
 *   sequential  1 MiB in order, one at a time, from the disk's start, repeatedly
 *
 * Each way first does some reads for warming up, and then writes two lines on the console:
 *
 *   begin WAY
 *   end WAY READS NANOSECONDS MEDIAN
 *
 * Between them it reads READS times, which takes NANOSECONDS; MEDIAN is that of one read, from its
 * submission to its completion. After `begin` it sleeps, so that the reader of the line does not
 * slow down the measurement. If something fails, it reports that, and ends. Built with
 * `gcc -static`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define PIECE (1 << 20)
#define IN_FLIGHT 8
#define WARM 200
#define COUNT 2000
#define WARM_PIECES 8
#define COUNT_PIECES 128
#define REST 50000000 /* ns */

static char buffer[PIECE] __attribute__((aligned(BLOCK)));
static char buffers[IN_FLIGHT][BLOCK] __attribute__((aligned(BLOCK)));
static uint64_t times[COUNT];
static uint64_t size;
static int disk;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        _exit(1);
}

static void fail(const char *what)
{
    say(what);
    _exit(1);
}

/* Reports that a way starts, sleeps, and returns the time. */
static uint64_t begin(const char *way)
{
    const struct timespec rest = { .tv_nsec = REST };
    char line[64];
    snprintf(line, sizeof(line), "begin %s\n", way);
    say(line);
    nanosleep(&rest, NULL);
    return now();
}

/* Reports that a way has ended; `times` has its reads. */
static void end(const char *way, int reads, uint64_t began)
{
    uint64_t taken = now() - began;
    char line[128];
    qsort(times, (size_t)reads, sizeof(times[0]), ascending);
    snprintf(line, sizeof(line), "end %s %d %llu %llu\n", way, reads, (unsigned long long)taken,
             (unsigned long long)times[reads / 2]);
    say(line);
}

/* Returns the offset of the next 4 KiB at random, in bytes. */
static uint64_t somewhere(void)
{
    static uint64_t state = 0x9e3779b97f4a7c15;
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 0x2545f4914f6cdd1d >> 16) % (size / BLOCK) * BLOCK;
}

static uint64_t read_at(uint64_t offset, size_t length)
{
    uint64_t start = now();
    if (pread(disk, buffer, length, (off_t)offset) != (ssize_t)length)
        fail("a read failed\n");
    return now() - start;
}

static void single(void)
{
    uint64_t began = 0;
    for (int n = -WARM; n < COUNT; n++) {
        if (n == 0)
            began = begin("single");
        uint64_t time = read_at(somewhere(), BLOCK);
        if (n >= 0)
            times[n] = time;
    }
    end("single", COUNT, began);
}

/* Reads into the `count` buffers `slots`, by one call. */
static void submit(aio_context_t context, const int *slots, int count, uint64_t *starts)
{
    struct iocb requests[IN_FLIGHT], *pointers[IN_FLIGHT];
    for (int i = 0; i < count; i++) {
        requests[i] = (struct iocb){
            .aio_data = (uint64_t)slots[i],
            .aio_lio_opcode = IOCB_CMD_PREAD,
            .aio_fildes = (uint32_t)disk,
            .aio_buf = (uintptr_t)buffers[slots[i]],
            .aio_nbytes = BLOCK,
            .aio_offset = (int64_t)somewhere(),
        };
        pointers[i] = &requests[i];
    }
    uint64_t start = now();
    for (int i = 0; i < count; i++)
        starts[slots[i]] = start;
    if (count > 0 && syscall(SYS_io_submit, context, (long)count, pointers) != count)
        fail("io_submit failed\n");
}

/* Reads `count` times with eight in flight, and waits for all of them. */
static void keep_eight(aio_context_t context, int count)
{
    uint64_t starts[IN_FLIGHT];
    int slots[IN_FLIGHT], submitted = IN_FLIGHT, completed = 0;
    for (int i = 0; i < IN_FLIGHT; i++)
        slots[i] = i;
    submit(context, slots, IN_FLIGHT, starts);
    while (completed < count) {
        struct io_event events[IN_FLIGHT];
        long got = syscall(SYS_io_getevents, context, 1L, (long)IN_FLIGHT, events, NULL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            fail("io_getevents failed\n");
        uint64_t time = now();
        int again = 0;
        for (long i = 0; i < got; i++) {
            int slot = (int)events[i].data;
            if (events[i].res != BLOCK)
                fail("a read failed\n");
            times[completed++] = time - starts[slot];
            if (submitted + again < count)
                slots[again++] = slot;
        }
        submit(context, slots, again, starts);
        submitted += again;
    }
}

static void eight(void)
{
    aio_context_t context = 0;
    uint64_t began;
    if (syscall(SYS_io_setup, (long)IN_FLIGHT, &context))
        fail("io_setup failed\n");
    keep_eight(context, WARM);
    began = begin("eight");
    keep_eight(context, COUNT);
    end("eight", COUNT, began);
    syscall(SYS_io_destroy, context);
}

static void sequential(void)
{
    uint64_t pieces = size / PIECE, began = 0;
    for (int n = -WARM_PIECES; n < COUNT_PIECES; n++) {
        if (n == 0)
            began = begin("sequential");
        uint64_t piece = (uint64_t)(n < 0 ? n + WARM_PIECES : n) % pieces;
        uint64_t time = read_at(piece * PIECE, PIECE);
        if (n >= 0)
            times[n] = time;
    }
    end("sequential", COUNT_PIECES, began);
}

int main(void)
{
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    disk = open("/dev/vda", O_RDONLY | O_DIRECT);
    if (disk < 0 || ioctl(disk, BLKGETSIZE64, &size) || size < PIECE)
        fail("no disk\n");
    single();
    eight();
    sequential();
    for (;;)
        pause();
}
