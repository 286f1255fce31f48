//! A misbehaving guest, and another one next to it. This needs a KVM that runs guests, and root.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::host::Host;
use support::until;

/// Number of lines of which the median is taken.
const SAMPLES: usize = 101;

/// How much slower round trips may be beside a bad neighbour. The aim is less than 2, where each of
/// both has a CPU. The emulated host has one for all, and its speed depends on what else runs
/// beside it, so it has more room: in it they were 1 to 2 times as slow.
const MOST_SLOWDOWN: f64 = 5.0;

/// Period of a control group's CPU limit, in microseconds.
const PERIOD: u64 = 100_000;

/// Endless programs: one that repeatedly takes all memory, one that takes the CPU, one that fills
/// the disk, and a fork bomb. The container's own process starts none after that: a shell that
/// cannot fork exits.
const BAD: &str = "\
    (while :; do tail /dev/zero >/dev/null; done) &
    (while :; do :; done) &
    (while :; do dd if=/dev/zero of=/big bs=1M 2>/dev/null; done) &
    bomb() { bomb & bomb; }; (bomb 2>/dev/null) &
    echo begun
    exec sleep 1000000";

/// A program in a container that returns each line.
struct Echo {
    program: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Echo {
    fn start(host: &Host, name: &str) -> Self {
        let mut cat = host.root.podvisor(&["exec", "-i", name, "cat"]);
        cat.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = cat.spawn().unwrap();
        let mut echo = Self {
            input: program.stdin.take().unwrap(),
            output: BufReader::new(program.stdout.take().unwrap()),
            program,
        };
        echo.round_trip();
        echo
    }

    fn round_trip(&mut self) -> Duration {
        let begin = Instant::now();
        self.input.write_all(b"line\n").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "line\n");
        begin.elapsed()
    }

    /// Returns the median duration of a round trip.
    fn median(&mut self) -> Duration {
        let mut times: Vec<_> = (0..SAMPLES).map(|_| self.round_trip()).collect();
        times.sort();
        times[SAMPLES / 2]
    }

    fn end(self) {
        let Self {
            mut program,
            input,
            output,
        } = self;
        drop((input, output));
        assert!(program.wait().unwrap().success());
    }
}

impl Host {
    /// Returns the control group of a container's machine.
    fn group(&self, name: &str) -> PathBuf {
        let inspected: Value = self.json(&["inspect", name]);
        let id = inspected[0]["Id"].as_str().unwrap();
        PathBuf::from("/sys/fs/cgroup/podvisor").join(id)
    }
}

fn number(path: PathBuf) -> u64 {
    let text = fs::read_to_string(&path).unwrap();
    text.trim().parse().unwrap()
}

#[test]
fn guest_in_which_everything_goes_wrong_is_alone_with_it() {
    let host = Host::default();
    host.start(&["--name", "good"], "exec sleep 1000000");
    let mut echo = Echo::start(&host, "good");
    let quiet = echo.median();
    host.start(&["--name", "bad"], BAD);
    host.logs_with("bad", "begun");
    let group = host.group("bad");
    let limit = number(group.join("memory.max"));
    // Its guest has used all of its memory.
    until("a bad guest that has taken its memory", || {
        number(group.join("memory.current")) > 100 << 20
    });
    host.podvisor(&["exec", "good", "echo", "here"])
        .printed("here\n");
    let peak = number(group.join("memory.peak"));
    assert!(peak <= limit + limit / 20, "{peak} of {limit} bytes");
    // Its memory is 128 MiB: the guest does not control what the process takes beyond that.
    assert!(peak < 200 << 20, "{peak} bytes");
    let events = fs::read_to_string(group.join("memory.events")).unwrap();
    assert!(events.contains("oom_kill 0\n"), "{events}");
    // CPU time: its vCPU and the share of its devices.
    let used = || -> u64 {
        let text = fs::read_to_string(group.join("cpu.stat"));
        let text = text.unwrap_or_else(|error| {
            let state: Value = host.json(&["inspect", "bad"]);
            panic!("{error}: {}", state[0]["State"])
        });
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "));
        line.unwrap().parse().unwrap()
    };
    let (begin, before) = (Instant::now(), used());
    let beside = echo.median();
    let took = used() - before;
    let elapsed = u64::try_from(begin.elapsed().as_micros()).unwrap();
    // Its quota for each period that has started.
    let most = (elapsed + 2 * PERIOD) * 3 / 2;
    assert!(took <= most + most / 20, "{took} of {elapsed} µs");
    // The node is usable: the container can be removed, others can start.
    host.podvisor(&["rm", "-f", "bad"]).printed("bad\n");
    assert!(!group.exists());
    // The host itself may be slower than at the beginning.
    let quiet = quiet.max(echo.median());
    echo.end();
    println!("a round trip takes {quiet:?}, and {beside:?} beside a bad neighbour");
    let slowdown = beside.as_secs_f64() / quiet.as_secs_f64();
    assert!(slowdown < MOST_SLOWDOWN, "{slowdown:.1} times as slow");
    host.start(&["--name", "next"], "exec sleep 1000000");
    host.podvisor(&["rm", "-f", "good", "next"])
        .printed("good\nnext\n");
    assert_eq!(host.left(), Vec::<String>::new());
}
