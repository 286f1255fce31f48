/* The init of the block benchmark's guest: reads the first disk at random, 4 KiB at a time and one at a
 * time, around the page cache. It writes `begin` before the requests that count, and `end` with the
 * median time of one in nanoseconds behind them. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define WARM 200
#define COUNT 2000

static char buffer[BLOCK] __attribute__((aligned(BLOCK)));
static uint64_t times[COUNT];

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

int main(void)
{
    uint64_t size, state = 0x9e3779b97f4a7c15;
    char line[64];
    int disk;

    mount("dev", "/dev", "devtmpfs", 0, NULL);
    disk = open("/dev/vda", O_RDONLY | O_DIRECT);
    if (disk < 0 || ioctl(disk, BLKGETSIZE64, &size) || size < BLOCK) {
        say("no disk\n");
        return 1;
    }
    for (int n = -WARM; n < COUNT; n++) {
        if (n == 0)
            say("begin\n");
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        uint64_t block = (state * 0x2545f4914f6cdd1d >> 16) % (size / BLOCK);
        uint64_t start = now();
        if (pread(disk, buffer, BLOCK, (off_t)(block * BLOCK)) != BLOCK) {
            say("a read failed\n");
            return 1;
        }
        if (n >= 0)
            times[n] = now() - start;
    }
    qsort(times, COUNT, sizeof(times[0]), ascending);
    snprintf(line, sizeof(line), "end %llu\n", (unsigned long long)times[COUNT / 2]);
    say(line);
    for (;;)
        pause();
}
