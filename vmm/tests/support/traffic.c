/* The traffic of the guest of guest_traffic.rs over its network card and its vsock device, by one word
 * of its command line after the other. It reports success as `WORD ok`, and errors as `bad WHAT`.
 * Built with `gcc -static`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <linux/vm_sockets.h>

#define HOST "10.9.0.1"
#define ECHO 7000    /* the host echoes here: TCP, UDP and vsock */
#define BARRIER 7001 /* the host closes when it is ready for the next step: TCP */
#define CALLS 7002   /* the host connects here: vsock */
#define STREAM (2 << 20)
#define SHORT 500 /* on each transport: one with offloads, one without */
#define DATAGRAMS 800
#define WINDOW 16
#define EACH_WAY 500 /* vsock connections from each side */
#define MESSAGE 512

static void bad(const char *what)
{
    printf("bad %s: %s\n", what, strerror(errno));
    exit(1);
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

static void send_all(int fd, const void *bytes, size_t count, const char *what)
{
    for (size_t at = 0; at < count;) {
        ssize_t n = send(fd, (const char *)bytes + at, count - at, MSG_NOSIGNAL);
        if (n <= 0)
            bad(what);
        at += n;
    }
}

/* Receives `count` bytes and compares them. */
static void expect(int fd, const void *bytes, size_t count, const char *what)
{
    static char found[1 << 16];

    for (size_t at = 0; at < count;) {
        size_t most = count - at < sizeof(found) ? count - at : sizeof(found);
        ssize_t n = recv(fd, found, most, 0);
        if (n <= 0)
            bad(what);
        if (memcmp(found, (const char *)bytes + at, n)) {
            errno = 0;
            bad(what);
        }
        at += n;
    }
}

static void expect_end(int fd, const char *what)
{
    char byte;

    if (recv(fd, &byte, 1, 0) != 0)
        bad(what);
    close(fd);
}

static int inet(int type, int port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    int fd = socket(AF_INET, type, 0);

    inet_pton(AF_INET, HOST, &address.sin_addr);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
        bad("connection");
    return fd;
}

/* Sends and receives at the same time, more than all buffers on the way hold. */
static void stream(void)
{
    static uint64_t words[STREAM / 8];
    int fd = inet(SOCK_STREAM, ECHO), status;
    pid_t sender;

    fill(words, STREAM, 1);
    sender = fork();
    if (sender == 0) {
        send_all(fd, words, STREAM, "stream's sending");
        shutdown(fd, SHUT_WR);
        _exit(0);
    }
    expect(fd, words, STREAM, "stream");
    expect_end(fd, "stream's end");
    if (waitpid(sender, &status, 0) != sender || status)
        bad("stream's sender");
}

static void shorts(void)
{
    uint64_t words[MESSAGE / 8];

    for (int n = 1; n <= SHORT; n++) {
        size_t bytes = 1 + n % MESSAGE;
        int fd = inet(SOCK_STREAM, ECHO);
        fill(words, MESSAGE, mixed(n));
        send_all(fd, words, bytes, "short connection's sending");
        shutdown(fd, SHUT_WR);
        expect(fd, words, bytes, "short connection");
        expect_end(fd, "short connection's end");
    }
}

/* Sends datagrams of every size, some of several frames. So few are in flight that no queue is full:
 * a lost datagram was lost by a device. */
static void datagrams(void)
{
    static uint64_t words[1024];
    static char found[sizeof(words)];
    int fd = inet(SOCK_DGRAM, ECHO);
    struct pollfd answer = { .fd = fd, .events = POLLIN };

    for (int first = 0; first < DATAGRAMS; first += WINDOW) {
        uint32_t seen = 0;
        for (int n = first; n < first + WINDOW; n++) {
            size_t bytes = 8 + mixed(n) % (n % 8 ? 1465 : sizeof(words) - 8);
            words[0] = n;
            fill(words + 1, sizeof(words) - 8, mixed(n));
            if (send(fd, words, bytes, 0) != (ssize_t)bytes)
                bad("datagram's sending");
        }
        while (seen != (1u << WINDOW) - 1) {
            if (poll(&answer, 1, 60000) != 1)
                bad("datagram: lost");
            ssize_t bytes = recv(fd, found, sizeof(found), 0);
            uint64_t n;
            memcpy(&n, found, 8);
            if (bytes < 8 || n < first || n >= first + WINDOW)
                bad("datagram's number");
            words[0] = n;
            fill(words + 1, sizeof(words) - 8, mixed(n));
            if ((size_t)bytes != 8 + mixed(n) % (n % 8 ? 1465 : sizeof(words) - 8) ||
                memcmp(found, words, bytes))
                bad("datagram's bytes");
            seen |= 1u << (n - first);
        }
    }
    close(fd);
}

static void barrier(void)
{
    expect_end(inet(SOCK_STREAM, BARRIER), "barrier");
}

static void ethtool(int socket, void *command, const char *what)
{
    struct ifreq request = { .ifr_name = "eth0", .ifr_data = command };

    if (ioctl(socket, SIOCETHTOOL, &request))
        bad(what);
}

/* Does what `ethtool -K eth0 tx off sg off tso off gso off gro off rx-gro-hw off` does. */
static void offloads_off(void)
{
    static const char *const names[] = {
        "tx-checksum-ip-generic", "tx-scatter-gather", "tx-tcp-segmentation",
        "tx-tcp-ecn-segmentation", "tx-tcp6-segmentation", "tx-generic-segmentation", "rx-gro",
        "rx-gro-hw",
    };
    struct { struct ethtool_sset_info info; uint32_t count; } set = {
        .info = { .cmd = ETHTOOL_GSSET_INFO, .sset_mask = 1ULL << ETH_SS_FEATURES },
    };
    int fd = socket(AF_INET, SOCK_DGRAM, 0);

    ethtool(fd, &set, "number of features");
    struct ethtool_gstrings *strings = calloc(1, sizeof(*strings) + set.count * ETH_GSTRING_LEN);
    strings->cmd = ETHTOOL_GSTRINGS;
    strings->string_set = ETH_SS_FEATURES;
    strings->len = set.count;
    ethtool(fd, strings, "names of features");
    size_t blocks = (set.count + 31) / 32;
    struct ethtool_sfeatures *change = calloc(1, sizeof(*change) + blocks * 8);
    struct ethtool_gfeatures *now = calloc(1, sizeof(*now) + blocks * 16);
    change->cmd = ETHTOOL_SFEATURES;
    change->size = blocks;
    for (size_t n = 0; n < sizeof(names) / sizeof(names[0]); n++)
        for (size_t bit = 0; bit < set.count; bit++)
            if (!strcmp((char *)strings->data + bit * ETH_GSTRING_LEN, names[n]))
                change->features[bit / 32].valid |= 1u << bit % 32;
    /* The result also counts features that change because of others. */
    struct ifreq request = { .ifr_name = "eth0", .ifr_data = (void *)change };
    if (ioctl(fd, SIOCETHTOOL, &request) < 0)
        bad("switching offloads off");
    now->cmd = ETHTOOL_GFEATURES;
    now->size = blocks;
    ethtool(fd, now, "features");
    for (size_t block = 0; block < blocks; block++)
        if (now->features[block].active & change->features[block].valid) {
            errno = 0;
            bad("offloads, which stay on");
        }
    close(fd);
}

/* Opens EACH_WAY connections from each side, all at the same time; then a message over each, both
 * ways; then one side after the other shuts down. */
static void vsock(void)
{
    static int fds[2 * EACH_WAY];
    static uint64_t words[MESSAGE / 8];
    struct rlimit files = { 4096, 4096 };
    struct sockaddr_vm here = {
        .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = CALLS,
    };
    struct sockaddr_vm there = {
        .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = ECHO,
    };
    int listener = socket(AF_VSOCK, SOCK_STREAM, 0);

    if (setrlimit(RLIMIT_NOFILE, &files))
        bad("limit of files");
    if (bind(listener, (struct sockaddr *)&here, sizeof(here)) || listen(listener, EACH_WAY))
        bad("vsock's listener");
    printf("vsock listens\n");
    fflush(stdout);
    for (int n = 0; n < EACH_WAY; n++) {
        fds[n] = socket(AF_VSOCK, SOCK_STREAM, 0);
        if (connect(fds[n], (struct sockaddr *)&there, sizeof(there)))
            bad("vsock's connection");
    }
    for (int n = EACH_WAY; n < 2 * EACH_WAY; n++)
        if ((fds[n] = accept(listener, NULL, NULL)) < 0)
            bad("vsock's caller");
    for (int n = 0; n < 2 * EACH_WAY; n++) {
        fill(words, MESSAGE, mixed(n));
        send_all(fds[n], words, MESSAGE, "vsock's sending");
    }
    for (int n = 2 * EACH_WAY; n-- > 0;) {
        fill(words, MESSAGE, mixed(n));
        expect(fds[n], words, MESSAGE, "vsock's bytes");
    }
    for (int n = 0; n < 2 * EACH_WAY; n++)
        n % 2 ? close(fds[n]) : shutdown(fds[n], SHUT_WR);
    for (int n = 0; n < 2 * EACH_WAY; n += 2)
        expect_end(fds[n], "vsock's end");
}

int main(int count, char **words)
{
    static const struct { const char *name; void (*run)(void); } jobs[] = {
        { "stream", stream }, { "shorts", shorts }, { "datagrams", datagrams },
        { "barrier", barrier }, { "offloads-off", offloads_off }, { "vsock", vsock },
    };

    for (int word = 1; word < count; word++)
        for (size_t job = 0; job < sizeof(jobs) / sizeof(jobs[0]); job++)
            if (!strcmp(words[word], jobs[job].name)) {
                jobs[job].run();
                printf("%s ok\n", jobs[job].name);
                fflush(stdout);
            }
    return 0;
}
