/* The init of the network benchmark's guest: takes the address 10.9.0.2 and serves one connection at
 * a time on port 5001. The first byte selects the mode: `e` echoes single bytes, `s` reads all and then
 * writes a byte, `g` and a number of bytes (eight, the lowest first) writes that many. It writes `ready`
 * on the console when it listens. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static char buffer[256 << 10];

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        _exit(1);
}

static struct sockaddr_in address(const char *text, uint16_t port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
    inet_pton(AF_INET, text, &a.sin_addr);
    return a;
}

static int set_up(int fd)
{
    struct sockaddr_in a = address("10.9.0.2", 0), mask = address("255.255.255.0", 0);
    struct ifreq request = { .ifr_name = "eth0" };
    memcpy(&request.ifr_addr, &a, sizeof(a));
    if (ioctl(fd, SIOCSIFADDR, &request))
        return -1;
    memcpy(&request.ifr_netmask, &mask, sizeof(mask));
    if (ioctl(fd, SIOCSIFNETMASK, &request))
        return -1;
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    return ioctl(fd, SIOCSIFFLAGS, &request);
}

static void echo(int fd)
{
    while (read(fd, buffer, 1) == 1)
        if (write(fd, buffer, 1) != 1)
            return;
}

static void sink(int fd)
{
    while (read(fd, buffer, sizeof(buffer)) > 0)
        ;
    if (write(fd, "k", 1) != 1)
        say("the end was not told\n");
}

static void generate(int fd)
{
    uint64_t left;
    if (recv(fd, &left, sizeof(left), MSG_WAITALL) != sizeof(left))
        return;
    while (left > 0) {
        ssize_t n = write(fd, buffer, left < sizeof(buffer) ? left : sizeof(buffer));
        if (n <= 0)
            return;
        left -= (uint64_t)n;
    }
}

int main(void)
{
    struct sockaddr_in here = address("0.0.0.0", 5001);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;

    if (listener < 0 || set_up(listener) ||
        bind(listener, (struct sockaddr *)&here, sizeof(here)) || listen(listener, 8)) {
        say("no network\n");
        return 1;
    }
    say("ready\n");
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        char kind = 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        if (read(fd, &kind, 1) == 1) {
            if (kind == 'e')
                echo(fd);
            if (kind == 's')
                sink(fd);
            if (kind == 'g')
                generate(fd);
        }
        close(fd);
    }
}
