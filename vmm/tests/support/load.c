/* The endless work of the guest of guest_rounds.rs, each part in a separate process: it writes its
 * first disk at random and reads back what it wrote before, sends bytes to an echo over TCP and over
 * vsock, and sums up memory. Four times a second it writes `at DISK NET VSOCK CPU end`, the rounds of
 * each; it reports errors as `bad WHAT`. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <linux/vm_sockets.h>

#define BLOCK 4096
#define BLOCKS 256
#define MESSAGE 4096
#define PORT 7000
#define PAUSE 250000 /* between two lines, in microseconds */

enum { DISK, NET, VSOCK, CPU, JOBS };

static volatile uint64_t *rounds; /* of each job, shared by all processes */

static void bad(const char *what)
{
    printf("bad %s: %s\n", what, strerror(errno));
    fflush(stdout);
    for (;;)
        pause();
}

static uint64_t mixed(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}

static void fill(uint64_t *words, size_t bytes, uint64_t seed)
{
    for (size_t n = 0; n < bytes / 8; n++)
        words[n] = mixed(seed + n);
}

static void disk(void)
{
    static uint64_t seeds[BLOCKS]; /* of the content of each block; 0: zeroes */
    static char found[BLOCK] __attribute__((aligned(BLOCK)));
    static char wanted[BLOCK] __attribute__((aligned(BLOCK)));
    int fd = open("/dev/vda", O_RDWR | O_DIRECT);

    if (fd < 0)
        bad("disk's opening");
    for (uint64_t round = 1;; round++) {
        uint64_t block = mixed(round) % BLOCKS;
        if (pread(fd, found, BLOCK, block * BLOCK) != BLOCK)
            bad("disk's read");
        memset(wanted, 0, BLOCK);
        if (seeds[block])
            fill((uint64_t *)wanted, BLOCK, seeds[block]);
        if (memcmp(found, wanted, BLOCK)) {
            errno = 0;
            bad("disk's contents");
        }
        seeds[block] = mixed(~round) | 1;
        fill((uint64_t *)wanted, BLOCK, seeds[block]);
        if (pwrite(fd, wanted, BLOCK, block * BLOCK) != BLOCK)
            bad("disk's write");
        if (round % 16 == 0 && fdatasync(fd))
            bad("disk's flush");
        rounds[DISK] = round;
    }
}

/* Sends a message and compares the answer. 0 if the connection is gone. */
static int echo(int fd, uint64_t seed, const char *what)
{
    uint64_t sent[MESSAGE / 8], back[MESSAGE / 8];
    size_t bytes = 8 * (1 + mixed(seed) % (MESSAGE / 8));

    fill(sent, bytes, seed);
    for (size_t at = 0; at < bytes;) {
        ssize_t n = send(fd, (char *)sent + at, bytes - at, MSG_NOSIGNAL);
        if (n <= 0)
            return 0;
        at += n;
    }
    for (size_t at = 0; at < bytes;) {
        ssize_t n = recv(fd, (char *)back + at, bytes - at, 0);
        if (n <= 0)
            return 0;
        at += n;
    }
    if (memcmp(sent, back, bytes)) {
        errno = 0;
        bad(what);
    }
    return 1;
}

/* Uses one connection, which is as old as the guest. */
static void net(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    inet_pton(AF_INET, "10.9.0.1", &address.sin_addr);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
        bad("net's connection");
    for (uint64_t round = 1;; round++) {
        if (!echo(fd, mixed(round), "net's bytes"))
            bad("net's connection, later");
        rounds[NET] = round;
    }
}

/* Uses a connection until it is reset, and then another one. */
static void vsock(void)
{
    struct sockaddr_vm address = {
        .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = PORT,
    };

    for (uint64_t round = 1;;) {
        int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
        if (fd < 0)
            bad("vsock's socket");
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
            while (echo(fd, mixed(round), "vsock's bytes"))
                rounds[VSOCK] = round++;
        close(fd);
    }
}

static void cpu(void)
{
    static uint64_t memory[1 << 17];
    uint64_t first = 0, last = 0;

    fill(memory, sizeof(memory), 1);
    for (uint64_t round = 1;; round++) {
        uint64_t sum = 0;
        struct timespec t;
        for (size_t n = 0; n < sizeof(memory) / 8; n++)
            sum = mixed(sum + memory[n]);
        clock_gettime(CLOCK_MONOTONIC, &t);
        uint64_t now = (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
        errno = 0;
        if (round == 1)
            first = sum;
        if (sum != first)
            bad("memory's contents");
        if (now < last)
            bad("clock, which went back");
        last = now;
        rounds[CPU] = round;
    }
}

int main(void)
{
    void (*const jobs[JOBS])(void) = { disk, net, vsock, cpu };

    rounds = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (rounds == MAP_FAILED)
        bad("start");
    for (int job = 0; job < JOBS; job++)
        if (fork() == 0)
            jobs[job]();
    for (;;) {
        usleep(PAUSE);
        printf("at %llu %llu %llu %llu end\n", (unsigned long long)rounds[DISK],
               (unsigned long long)rounds[NET], (unsigned long long)rounds[VSOCK],
               (unsigned long long)rounds[CPU]);
        fflush(stdout);
    }
}
