/* The init of the image benchmark's guest: mounts the EROFS image on the device that the kernel's command
 * line names (`image=/dev/vda`), with DAX if that is memory, reads its file `read` by calls, and unless
 * the command line has `until=read` its file `map` by a mapping, twice. It writes a line after each step,
 * the first one with the guest's free memory in KiB. Built with `gcc -static`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define PAGE 4096

static char buffer[64 << 10] __attribute__((aligned(PAGE)));

static volatile unsigned sum;

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

/* Touches each page of a file, as a program does with its code and data. */
static void map(void)
{
    int fd = open("/image/map", O_RDONLY);
    struct stat file;
    const volatile char *bytes;

    if (fd < 0 || fstat(fd, &file))
        fail("the file cannot be opened\n");
    bytes = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        fail("the file cannot be mapped\n");
    for (off_t at = 0; at < file.st_size; at += PAGE)
        sum += (unsigned char)bytes[at];
    munmap((void *)bytes, (size_t)file.st_size);
    close(fd);
}

int main(void)
{
    const char *device = getenv("image");
    struct sysinfo info;
    char line[64];
    int fd;

    if (!device)
        fail("no image\n");
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    sysinfo(&info);
    snprintf(line, sizeof(line), "up %lu\n", info.freeram / 1024 * info.mem_unit);
    say(line);
    mkdir("/image", 0755);
    if (mount(device, "/image", "erofs", MS_RDONLY, strstr(device, "pmem") ? "dax=always" : ""))
        fail("the image cannot be mounted\n");
    say("mounted\n");
    fd = open("/image/read", O_RDONLY);
    if (fd < 0 || read(fd, buffer, PAGE) != PAGE)
        fail("the file cannot be read\n");
    say("first\n");
    while (read(fd, buffer, sizeof(buffer)) > 0)
        sum += (unsigned char)buffer[0];
    say("read\n");
    if (!getenv("until")) {
        map();
        say("mapped\n");
        map();
        say("again\n");
    }
    for (;;)
        pause();
}
