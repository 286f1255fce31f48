/*
 * An /init that measures the cost of a task switch in a container, with and without `psi=1`
 * (docs/kernel.md): two processes in a control group two levels deep, as the agent's are, pass a
 * byte back and forth. With QEMU's `-icount shift=0` a nanosecond is an instruction.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GROUP "/groups/podvisor/c1"
#define ROUNDS 20000
#define READS 200

static void check(int failed, const char *what)
{
	if (!failed)
		return;
	perror(what);
	reboot(RB_AUTOBOOT);
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	check(fd < 0 || write(fd, text, strlen(text)) < 0, path);
	close(fd);
}

static double now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static void hand_over(int from, int to)
{
	char byte;

	check(read(from, &byte, 1) != 1 || write(to, &byte, 1) != 1, "hand a byte over");
}

static void rounds(int from, int to, int count)
{
	while (count--)
		hand_over(from, to);
}

int main(void)
{
	int there[2], back[2];
	double began;

	mkdir("/groups", 0755);
	check(mount("groups", "/groups", "cgroup2", 0, NULL), "mount cgroup2");
	put("/groups/cgroup.subtree_control", "+cpu +memory +io +pids");
	mkdir("/groups/podvisor", 0755);
	put("/groups/podvisor/cgroup.subtree_control", "+cpu +memory +io +pids");
	mkdir(GROUP, 0755);
	put(GROUP "/cgroup.procs", "0");

	check(pipe(there) || pipe(back), "make pipes");
	if (fork() == 0)
		for (;;)
			hand_over(there[0], back[1]);
	check(write(there[1], "", 1) != 1, "begin");
	rounds(back[0], there[1], ROUNDS / 20);
	began = now_ns();
	rounds(back[0], there[1], ROUNDS);
	printf("a round trip: %.0f ns\n", (now_ns() - began) / ROUNDS);

	began = now_ns();
	for (int i = 0; i < READS; i++) {
		char text[256];
		int fd = open(GROUP "/cpu.pressure", O_RDONLY);

		if (fd < 0)
			break;
		check(read(fd, text, sizeof(text)) <= 0, "read " GROUP "/cpu.pressure");
		close(fd);
		if (i == READS - 1)
			printf("a look at its pressure: %.0f ns\n", (now_ns() - began) / READS);
	}
	fflush(stdout);
	reboot(RB_AUTOBOOT);
}
