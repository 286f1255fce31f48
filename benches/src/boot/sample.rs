//! A process's data in /proc: CPU time of each thread, and memory beyond the guest's.
#![allow(unsafe_code)] // the CPU clock of another process, and the scheduling policy

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::peers::Kind;

/// A process at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// The time since the process was started.
    pub(crate) to_init: Duration,
    pub(crate) threads: Vec<Thread>,
    /// CPU time of threads that have ended, in ns.
    pub(crate) ended_threads: u64,
    pub(crate) memory: Memory,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) name: String,
    /// Whether it runs the guest.
    pub(crate) vcpu: bool,
    /// CPU time in ns, the guest's included.
    pub(crate) cpu: u64,
}

/// Sizes in KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Proportional set size of all mappings except the guest's memory.
    pub(crate) pss: u64,
    /// Anonymous pages of all mappings except the guest's memory.
    pub(crate) anonymous: u64,
    /// Resident pages of the guest's memory.
    pub(crate) guest: u64,
    /// Those of them that are private to this process.
    pub(crate) guest_anonymous: u64,
    /// Shared libraries that are mapped.
    pub(crate) libraries: Vec<String>,
}

impl Sample {
    /// Returns the CPU time of all threads except vCPUs, in ns.
    pub(crate) fn own(&self) -> u64 {
        let alive: u64 = self.threads.iter().filter(|t| !t.vcpu).map(|t| t.cpu).sum();
        alive + self.ended_threads
    }

    /// Returns the CPU time of the vCPUs, in ns.
    pub(crate) fn vcpus(&self) -> u64 {
        self.threads.iter().filter(|t| t.vcpu).map(|t| t.cpu).sum()
    }
}

/// Samples the process `pid`, which runs a guest of `memory_mib`.
pub(crate) fn take(pid: u32, kind: Kind, memory_mib: u64, to_init: Duration) -> Result<Sample> {
    let total = process_cpu(pid).context("the process's CPU clock cannot be read")?;
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let directory = entry?.path();
        let name = fs::read_to_string(directory.join("comm"))?
            .trim_end()
            .to_owned();
        let text = fs::read_to_string(directory.join("schedstat"))?;
        let cpu = text
            .split_whitespace()
            .next()
            .and_then(|field| field.parse().ok())
            .with_context(|| format!("no CPU time in {}", directory.display()))?;
        threads.push(Thread {
            vcpu: kind.is_vcpu(&name),
            name,
            cpu,
        });
    }
    if !threads.iter().any(|thread| thread.vcpu) {
        let names: Vec<&str> = threads.iter().map(|thread| thread.name.as_str()).collect();
        bail!("no thread runs a vCPU: {}", names.join(", "));
    }
    let alive: u64 = threads.iter().map(|thread| thread.cpu).sum();
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    Ok(Sample {
        to_init,
        ended_threads: total.saturating_sub(alive),
        threads,
        memory: Memory::of(&smaps, memory_mib * 1024)?,
    })
}

#[derive(Debug, Default)]
struct Mapping<'a> {
    file: &'a str,
    range: (u64, u64),
    size: u64,
    rss: u64,
    pss: u64,
    anonymous: u64,
}

impl Memory {
    /// Adds up an smaps file. The guest's memory is exactly `guest_kib`: a mapping, or several
    /// adjacent ones, that differ in their advice or are the holes of a file.
    pub(crate) fn of(smaps: &str, guest_kib: u64) -> Result<Self> {
        let mut mappings: Vec<Mapping<'_>> = Vec::new();
        for line in smaps.lines() {
            let Some((key, rest)) = line.split_once(char::is_whitespace) else {
                continue;
            };
            let Some(field) = key.strip_suffix(':') else {
                // `address perms offset device inode path`
                let file = rest.trim_start().splitn(5, ' ').nth(4).unwrap_or_default();
                mappings.push(Mapping {
                    file: file.trim(),
                    range: addresses(key),
                    ..Mapping::default()
                });
                continue;
            };
            let Some(mapping) = mappings.last_mut() else {
                continue;
            };
            let value = || {
                let number = rest.split_whitespace().next();
                number.and_then(|n| n.parse().ok()).unwrap_or(0)
            };
            match field {
                "Size" => mapping.size = value(),
                "Rss" => mapping.rss = value(),
                "Pss" => mapping.pss = value(),
                "Anonymous" => mapping.anonymous = value(),
                _ => {}
            }
        }
        let Some(guest) = guest_memory(&mappings, guest_kib) else {
            bail!("no mapping is {guest_kib} KiB large: where is the guest's memory?");
        };
        let mut result = Self::default();
        for part in mappings.drain(guest) {
            result.guest += part.rss;
            result.guest_anonymous += part.anonymous;
        }
        for mapping in &mappings {
            result.pss += mapping.pss;
            result.anonymous += mapping.anonymous;
            let name = mapping.file.rsplit('/').next().unwrap_or_default();
            let known = result
                .libraries
                .iter()
                .any(|library| library == mapping.file);
            if mapping.file.starts_with('/') && name.contains(".so") && !known {
                result.libraries.push(mapping.file.to_owned());
            }
        }
        Ok(result)
    }
}

/// Returns the two ends of a mapping, as smaps writes them; 0 if they are missing.
fn addresses(text: &str) -> (u64, u64) {
    let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
    let (start, end) = text.split_once('-').unwrap_or_default();
    (number(start), number(end))
}

/// Returns the indexes of the adjacent mappings, anonymous and of one file at most, that are `kib`
/// large in total. If there are several, those of which most is resident: the C library's allocator
/// reserves as much for a thread as a small guest has.
fn guest_memory(mappings: &[Mapping<'_>], kib: u64) -> Option<std::ops::Range<usize>> {
    let candidates = (0..mappings.len()).filter_map(|first| {
        let mut size = 0;
        let mut file = "";
        for (index, mapping) in mappings.iter().enumerate().skip(first) {
            let adjacent = index == first || mappings[index - 1].range.1 == mapping.range.0;
            if file.is_empty() {
                file = mapping.file;
            }
            let fits = mapping.file.is_empty() || mapping.file == file;
            size += mapping.size;
            if !adjacent || !fits || size > kib {
                return None;
            }
            if size == kib {
                return Some(first..index + 1);
            }
        }
        None
    });
    candidates.max_by_key(|range| {
        let parts = mappings[range.clone()].iter();
        parts.map(|mapping| mapping.rss).sum::<u64>()
    })
}

/// Returns the CPU time of a process with all its threads, ended ones too, in ns.
pub(crate) fn process_cpu(pid: u32) -> io::Result<u64> {
    let mut clock = MaybeUninit::uninit();
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // SAFETY: `clock` is valid for writing; on success (0) it is initialised.
    let clock = unsafe {
        match libc::clock_getcpuclockid(pid, clock.as_mut_ptr()) {
            0 => clock.assume_init(),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    };
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` is valid for writing; on success (0) it is initialised.
    let time = unsafe {
        if libc::clock_gettime(clock, time.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        time.assume_init()
    };
    let part = |value: i64| u64::try_from(value).map_err(io::Error::other);
    Ok(part(time.tv_sec)? * 1_000_000_000 + part(time.tv_nsec)?)
}

/// A raised scheduling policy of the calling thread; children do not inherit it.
#[derive(Debug)]
pub(crate) struct Priority(());

impl Priority {
    pub(crate) fn raise() -> Self {
        let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
        let parameter = libc::sched_param { sched_priority: 1 };
        // SAFETY: a valid pointer; the call changes how this thread is scheduled. Without the
        // permission to do so it fails, and nothing changes.
        unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) };
        Self(())
    }
}

impl Drop for Priority {
    fn drop(&mut self) {
        let parameter = libc::sched_param { sched_priority: 0 };
        // SAFETY: as above.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameter) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0100000 r-xp 00000000 00:1c 42                         /dev/shm/x y/vmm
Size:               1024 kB
Rss:                 512 kB
Pss:                 500 kB
Pss_Dirty:             0 kB
Anonymous:            12 kB
VmFlags: rd ex mr mw me
7effffff0000-7f0000000000 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                   0 kB
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                 100 kB
Pss:                 100 kB
Anonymous:           100 kB
7f0000200000-7f0008000000 rw-p 00000000 00:00 0
Size:             129024 kB
Rss:               29900 kB
Pss:               29900 kB
Anonymous:         29900 kB
7f0010000000-7f0010001000 r--p 00000000 00:1c 43                         /lib/libc.so.6
Size:                  4 kB
Rss:                   4 kB
Pss:                   1 kB
Anonymous:             0 kB
7f0010001000-7f0010002000 r-xp 00001000 00:1c 43                         /lib/libc.so.6
Size:                  4 kB
Rss:                   4 kB
Pss:                   2 kB
Anonymous:             0 kB
";

    #[test]
    fn the_guests_memory_is_left_out_and_libraries_count_once() {
        let memory = Memory::of(SMAPS, 131_072).unwrap();
        assert_eq!(memory.pss, 503);
        assert_eq!(memory.anonymous, 12);
        assert_eq!(memory.guest, 30_000);
        assert_eq!(memory.libraries, ["/lib/libc.so.6"]);
    }

    #[test]
    fn the_guests_memory_may_be_a_file_with_holes() {
        let first = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0";
        let of_file = format!("{first} /run/memory");
        let memory = Memory::of(&SMAPS.replace(first, &of_file), 131_072).unwrap();
        assert_eq!((memory.guest, memory.pss), (30_000, 503));
    }

    #[test]
    fn without_a_mapping_of_the_guests_size_nothing_is_reported() {
        assert!(Memory::of(SMAPS, 65_536).is_err());
    }

    #[test]
    fn a_processs_cpu_clock_runs_and_counts_ended_threads() {
        let before = process_cpu(std::process::id()).unwrap();
        std::thread::spawn(|| {
            let began = process_cpu(std::process::id()).unwrap();
            while process_cpu(std::process::id()).unwrap() < began + 5_000_000 {}
        })
        .join()
        .unwrap();
        assert!(process_cpu(std::process::id()).unwrap() >= before + 5_000_000);
        assert!(process_cpu(u32::MAX).is_err());
    }
}
