/* The init of the migration benchmark's guest: fills as many MiB as the command line's `fill` says with data
 * that differs from page to page, writes `ready`, and then, once per millisecond, writes to the next `pages`
 * pages of the first `region` MiB and puts the next byte of a sequence (0x80 to 0xff, again and again) on the
 * console. It does so by the kernel's driver: an emulated host's processor loses a program's right to the port when
 * the guest moves. What was missed while it stood still is not made up for. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define TICK 1000000

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        _exit(1);
}

static void fail(const char *text)
{
    say(text);
    _exit(1);
}

static size_t number(const char *name)
{
    const char *text = getenv(name);

    if (!text)
        fail("a number is missing on the command line\n");
    return strtoul(text, NULL, 10);
}

static int is_before(const struct timespec *one, const struct timespec *other)
{
    return one->tv_sec != other->tv_sec ? one->tv_sec < other->tv_sec : one->tv_nsec < other->tv_nsec;
}

int main(void)
{
    size_t fill = number("fill") << 20, region = number("region") << 20, pages = number("pages");
    size_t at = 0;
    unsigned char next = 0x80;
    struct timespec due, now;
    volatile uint64_t *memory;

    if (region < PAGE || region > fill)
        fail("the region is not part of what is filled\n");
    memory = mmap(NULL, fill, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("no memory\n");
    for (size_t word = 0; word < fill / sizeof(*memory); word++)
        memory[word] = word * 0x9e3779b97f4a7c15;
    say("ready\n");
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (;;) {
        due.tv_nsec += TICK;
        if (due.tv_nsec >= 1000000000) {
            due.tv_nsec -= 1000000000;
            due.tv_sec++;
        }
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR)
            ;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (is_before(&due, &now))
            due = now;
        for (size_t page = 0; page < pages; page++) {
            memory[at / sizeof(*memory)]++;
            at = (at + PAGE) % region;
        }
        if (write(1, &next, 1) != 1)
            fail("the console takes no byte\n");
        next = next == 0xff ? 0x80 : next + 1;
    }
}
