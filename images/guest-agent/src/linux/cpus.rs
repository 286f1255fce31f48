//! CPUs that come and go (`/sys/devices/system/cpu`).

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::text::read_text;
use crate::protocol::{Fault, Vcpu};

const DIRECTORY: &str = "sys/devices/system/cpu";

/// CPUs by their numbers, and whether each is online, if it can be anything else.
fn found(root: &Path) -> Result<Vec<(u32, Option<bool>)>, Fault> {
    let directory = root.join(DIRECTORY);
    let failed = |error: std::io::Error| {
        Fault::io("list the CPUs in", &directory.display().to_string(), &error)
    };
    let entries = fs::read_dir(&directory).map_err(failed)?;
    let mut cpus = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        let Some(number) = number.and_then(|number| number.parse().ok()) else {
            continue;
        };
        // Without the file, it is always online.
        let online = read_text(&switch(root, number)).ok();
        cpus.push((number, online.map(|text| text.trim() == "1")));
    }
    cpus.sort_unstable();
    Ok(cpus)
}

fn switch(root: &Path, number: u32) -> PathBuf {
    root.join(DIRECTORY).join(format!("cpu{number}/online"))
}

pub(super) fn list(root: &Path) -> Result<Value, Fault> {
    let cpus = found(root)?.into_iter().map(|(number, online)| {
        json!({
            "logical-id": number,
            "online": online.unwrap_or(true),
            "can-offline": online.is_some(),
        })
    });
    Ok(cpus.collect())
}

/// Returns how many are as they should be, up to the first one that fails.
pub(super) fn set(root: &Path, wanted: &[Vcpu]) -> Result<Value, Fault> {
    let known = found(root)?;
    for (count, cpu) in wanted.iter().enumerate() {
        let number = cpu.logical_id;
        let set = match known.iter().find(|(known, _)| *known == number) {
            None => Err(Fault::new(format!("there is no CPU {number}"))),
            Some((_, online)) if online.unwrap_or(true) == cpu.online => Ok(()),
            Some((_, None)) => Err(Fault::new(format!("CPU {number} is always online"))),
            Some((_, Some(_))) => {
                let written = fs::write(switch(root, number), if cpu.online { "1" } else { "0" });
                written.map_err(|error| {
                    let which = if cpu.online { "online" } else { "offline" };
                    Fault::io(&format!("bring {which}"), &format!("CPU {number}"), &error)
                })
            }
        };
        match set {
            Ok(()) => {}
            Err(fault) if count == 0 => return Err(fault),
            Err(_) => return Ok(json!(count)),
        }
    }
    Ok(json!(wanted.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(text: &str) -> Vec<Vcpu> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn cpus_are_listed_and_brought_online_up_to_the_first_that_fails() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu0", "cpu1", "cpu10", "cpufreq"] {
            fs::create_dir_all(dir.path().join(DIRECTORY).join(name)).unwrap();
        }
        for (number, online) in [(1, "0\n"), (10, "1\n")] {
            fs::write(switch(dir.path(), number), online).unwrap();
        }
        let listed = list(dir.path()).unwrap();
        assert_eq!(
            listed,
            json!([
                { "logical-id": 0, "online": true, "can-offline": false },
                { "logical-id": 1, "online": false, "can-offline": true },
                { "logical-id": 10, "online": true, "can-offline": true },
            ])
        );
        let all = r#"[{"logical-id": 0, "online": true},
                      {"logical-id": 1, "online": true, "can-offline": true},
                      {"logical-id": 7, "online": true}]"#;
        assert_eq!(set(dir.path(), &wanted(all)).unwrap(), 2);
        assert_eq!(fs::read_to_string(switch(dir.path(), 1)).unwrap(), "1");
        for (one, said) in [
            (r#"[{"logical-id": 7, "online": true}]"#, "no CPU 7"),
            (r#"[{"logical-id": 0, "online": false}]"#, "always online"),
        ] {
            let fault = set(dir.path(), &wanted(one)).unwrap_err();
            assert!(fault.desc.contains(said), "{fault}");
        }
    }
}
