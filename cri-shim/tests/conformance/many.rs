//! Many containers in one pod, many programs in one container: as in a pod that restarts its
//! containers and is probed for weeks.

use std::thread;

use crate::fixture::RUNTIME;
use crate::pod::{Container, Pod, stdout, strings};
use crate::support::until;

/// Returns the count in the variable, for a manual long run.
pub(crate) fn count(variable: &str, otherwise: usize) -> usize {
    let text = std::env::var(variable).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Counts the container's own process, and the counting shell.
const PROCESSES: &str = "set -- /proc/[0-9]*; echo $#";

/// Waits for the end of all other programs in the container. They are reaped soon after their exits
/// are reported.
fn until_alone(container: &Container) {
    until("the end of all programs", || {
        container.sh(PROCESSES) == "2\n"
    });
}

/// Returns the kibibytes that the kernel has available.
fn available(meter: &Container) -> u64 {
    let text = meter.sh("grep MemAvailable /proc/meminfo");
    text.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the free inodes of the guest's /run, where the agent keeps its state.
fn free_files(meter: &Container) -> u64 {
    let text = meter.sh("stat -f -c %d /etc/hostname");
    text.trim().parse().unwrap()
}

#[test]
fn guest_long_containers_come_and_go_in_one_pod_and_leave_nothing() {
    let pod = Pod::run("many", |_| {});
    let meter = pod.start("meter", |_| {});
    let round = |number: usize| {
        let containers: Vec<Container> = (0..4)
            .map(|n| {
                pod.start("one", |config| {
                    let script = format!("cat /proc/uptime >/x && echo {number}.{n}; exit {n}");
                    config.command = strings(&["sh", "-c", &script]);
                })
            })
            .collect();
        for (n, container) in (0..).zip(&containers) {
            assert_eq!(container.ended().exit_code, n);
            let expected = format!("{number}.{n}");
            assert_eq!(stdout(&container.lines()), [expected.as_str()]);
            container.remove();
        }
    };
    // What the first ones leave are caches.
    round(0);
    let files = free_files(&meter);
    for _ in 0..20 {
        meter.sh("true");
    }
    if RUNTIME.is_vm {
        // Those of the checking exec itself may still exist.
        let lost = files.saturating_sub(free_files(&meter));
        assert!(lost < 10, "{lost} files of /run are lost");
    }
    let before = available(&meter);
    let rounds = count("PODVISOR_CONFORMANCE_ROUNDS", 3);
    for number in 1..=rounds {
        round(number);
        if rounds > 3 {
            println!("round {number}: {} KiB available", available(&meter));
        }
    }
    let after = available(&meter);
    if RUNTIME.is_vm {
        let lost = before.saturating_sub(after);
        assert!(lost < 16 << 10, "{lost} KiB are lost");
        until_alone(&meter);
    }
}

#[test]
fn guest_many_programs_run_at_once_in_one_container() {
    let container = Pod::shared().start("busy", |_| {});
    let programs = count("PODVISOR_CONFORMANCE_EXECS", 20);
    thread::scope(|scope| {
        for number in 0..programs {
            let container = &container;
            scope.spawn(move || {
                let script = format!("echo {number}; echo e{number} >&2; exit {}", number % 100);
                let output = container.try_exec(&["sh", "-c", &script], 0).unwrap();
                assert_eq!(output.stdout, format!("{number}\n"));
                assert_eq!(output.stderr, format!("e{number}\n"));
                assert_eq!(usize::try_from(output.code).unwrap(), number % 100);
            });
        }
    });
    until_alone(&container);
    container.stop(0);
    container.remove();
}
