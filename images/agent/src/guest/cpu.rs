//! Number of processors that the guest uses. The host adds vCPUs without notifying the kernel,
//! which has known about all of them since boot.

use std::fs;
use std::io;
use std::path::Path;

/// Where Linux has a directory for each known processor.
const CPUS: &str = "/sys/devices/system/cpu";

/// The guest could not use the requested number of processors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// Zero, or more than the kernel knows.
    #[error("{count} CPUs: this guest has 1 to {most}")]
    Count {
        /// The requested number.
        count: u32,
        /// The number that the kernel knows.
        most: u32,
    },
    /// The kernel refused.
    #[error("failed to {action} {path}")]
    File {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Makes the guest use its first `count` processors: brings the missing ones online, and takes the
/// others offline.
///
/// # Errors
///
/// [`CpuError`]; some may have been brought online or taken offline then.
pub fn use_first(count: u32) -> Result<(), CpuError> {
    use_first_below(Path::new(CPUS), count)
}

fn use_first_below(cpus: &Path, count: u32) -> Result<(), CpuError> {
    let known = |cpu: &u32| cpus.join(format!("cpu{cpu}")).is_dir();
    let most = (0..).take_while(known).count();
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    if count == 0 || count > most {
        return Err(CpuError::Count { count, most });
    }
    // The first processor is always online, and has no such file.
    for cpu in 1..most {
        let path = cpus.join(format!("cpu{cpu}/online"));
        let failed = |action| {
            let path = path.display().to_string();
            move |source| CpuError::File {
                action,
                path,
                source,
            }
        };
        let is_online = fs::read_to_string(&path).map_err(failed("read"))?.trim() == "1";
        let wanted = cpu < count;
        if is_online != wanted {
            let value = if wanted { "1" } else { "0" };
            fs::write(&path, value).map_err(failed("write"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_brought_up_and_taken_off_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let online = |cpu: u32| dir.path().join(format!("cpu{cpu}/online"));
        for cpu in 0..4 {
            fs::create_dir(dir.path().join(format!("cpu{cpu}"))).unwrap();
        }
        for (cpu, state) in [(1, "1\n"), (2, "0\n"), (3, "0\n")] {
            fs::write(online(cpu), state).unwrap();
        }
        fs::create_dir(dir.path().join("cpufreq")).unwrap();
        let used = || [1, 2, 3].map(|cpu| fs::read_to_string(online(cpu)).unwrap());
        use_first_below(dir.path(), 3).unwrap();
        assert_eq!(used(), ["1\n", "1", "0\n"], "only what changes is written");
        use_first_below(dir.path(), 1).unwrap();
        assert_eq!(used(), ["0", "0", "0\n"]);
        use_first_below(dir.path(), 4).unwrap();
        assert_eq!(used(), ["1", "1", "1"]);
        for count in [0, 5] {
            let refused = use_first_below(dir.path(), count).unwrap_err();
            assert_eq!(
                refused.to_string(),
                format!("{count} CPUs: this guest has 1 to 4")
            );
        }
        fs::remove_file(online(2)).unwrap();
        let failed = use_first_below(dir.path(), 4).unwrap_err();
        assert!(failed.to_string().contains("failed to read "), "{failed}");
    }
}
