//! Pods' networks by Debian's plugins, each test in a "host" that is a network namespace of its
//! own, and by misbehaving scripts.
#![allow(unsafe_code)] // a network namespace for one thread

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use podvisor_host::small_disk::SmallDisk;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::mount::{UnmountFlags, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::cache::Cached;
use super::input::Input;
use super::links::Route;
use super::plugin::write_script;
use super::*;

mod dhcp;
mod masquerade;
mod namespace;
mod undo;

/// Bytes before each frame: `struct virtio_net_hdr` without the number of buffers.
const VNET_HEADER: usize = 10;

struct World {
    dir: TempDir,
    cni: Cni,
}

impl World {
    /// A node with one configuration list; scripts are found before Debian's plugins.
    fn new(list: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| -> PathBuf {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let options = CniOptions {
            config_dir: path("net.d"),
            plugin_dirs: vec![path("bin"), "/usr/lib/cni".into()],
            cache_dir: path("cache"),
            netns_dir: path("netns"),
            public_netns_dir: None,
            plugin_timeout: Duration::from_secs(60),
        };
        let file = options.config_dir.join("10-test.conflist");
        fs::write(file, list.to_string()).unwrap();
        let cni = Cni::open(options).unwrap();
        Self { dir, cni }
    }

    async fn attach(&self, capabilities: Capabilities) -> Result<Attachment, CniError> {
        let prepared = self.cni.prepare("pod0")?;
        self.cni.attach(&pod(), capabilities, prepared).await
    }

    fn script(&self, name: &str, script: &str) {
        write_script(&self.dir.path().join("bin"), name, script);
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(name)).unwrap()
    }

    fn is_clean(&self) -> bool {
        self.cni.known().unwrap().is_empty()
    }
}

fn pod() -> PodIdentity {
    PodIdentity {
        id: "pod0".to_owned(),
        name: "web".to_owned(),
        namespace: "default".to_owned(),
        uid: "u-1".to_owned(),
    }
}

/// Runs a test in a network namespace that plays the host.
fn in_host<T: Send>(test: impl AsyncFnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let run = || {
            // SAFETY: only this thread gets another network namespace, and it ends after that.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("this test needs root");
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(test())
        };
        scope.spawn(run).join().unwrap()
    })
}

fn command(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let output = std::process::Command::new(words[0])
        .args(&words[1..])
        .output()
        .unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Processes of a process group that are not zombies.
fn living_of_group(group: &str) -> usize {
    let stats = fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let lives = |stat: &String| {
        let (_, rest) = stat.rsplit_once(')').unwrap_or_default();
        let words: Vec<&str> = rest.split_whitespace().collect();
        words.first() != Some(&"Z") && words.get(2) == Some(&group)
    };
    stats.filter(lives).count()
}

fn bridge(data: &str, ranges: &Value) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "test",
        "plugins": [
            {
                "type": "bridge", "bridge": "br0", "isGateway": true, "mtu": 1400,
                "ipam": {
                    "type": "host-local", "ranges": ranges, "dataDir": data,
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
        ],
    })
}

/// Plays a guest that answers the first ARP request on its card.
fn answer_arp(tap: OwnedFd, mac: [u8; 6]) -> Vec<u8> {
    let mut tap = File::from(tap);
    let mut buffer = [0; 2048];
    loop {
        let count = tap.read(&mut buffer).unwrap();
        let frame = buffer[VNET_HEADER..count].to_vec();
        if frame[12..14] != [8, 6] {
            continue;
        }
        let mut reply = vec![0; VNET_HEADER];
        reply.extend_from_slice(&frame[6..12]);
        reply.extend_from_slice(&mac);
        reply.extend_from_slice(&frame[12..20]);
        reply.extend_from_slice(&[0, 2]);
        reply.extend_from_slice(&mac);
        reply.extend_from_slice(&frame[38..42]);
        reply.extend_from_slice(&frame[22..32]);
        tap.write_all(&reply).unwrap();
        return frame;
    }
}

#[test]
fn a_bridge_and_a_guest_exchange_frames_and_nothing_stays_after_it() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let ranges = json!([[{"subnet": "10.88.7.0/24"}], [{"subnet": "fd88::/64"}]]);
        let list = bridge(data.path().to_str().unwrap(), &ranges);
        let world = World::new(&list);
        assert_eq!(world.cni.ready().await.unwrap(), "test");
        let mut attachment = world.attach(Capabilities::new()).await.unwrap();

        let addresses: Vec<String> = attachment
            .addresses
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(addresses, ["10.88.7.2", "fd88::2"]);
        let nic = attachment.nics.remove(0);
        assert_eq!((nic.name.as_str(), nic.mtu), ("eth0", 1400));
        let own: Vec<String> = nic.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(own, ["10.88.7.2/24", "fd88::2/64"]);
        let default = Route {
            destination: "0.0.0.0/0".parse().unwrap(),
            gateway: Some("10.88.7.1".parse().unwrap()),
            interface: "eth0".to_owned(),
            mtu: None,
            metric: None,
            source: None,
        };
        assert!(
            attachment.routes.contains(&default),
            "{:?}",
            attachment.routes
        );
        world
            .cni
            .check("pod0", std::future::pending())
            .await
            .unwrap();

        let (tap, mac) = (nic.tap, nic.mac);
        let guest = thread::spawn(move || answer_arp(tap, mac));
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"hello", "10.88.7.2:9").unwrap();
        let asked = guest.join().unwrap();
        assert_eq!(asked[38..42], [10, 88, 7, 2]);
        let mac: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        let neighbours = command("ip neigh show 10.88.7.2");
        assert!(neighbours.contains(&mac.join(":")), "{neighbours}");

        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
        assert!(!command("ip -br link").contains("veth"));
        let leases: Vec<_> = fs::read_dir(data.path().join("test")).unwrap().collect();
        let is_lease = |name: &str| name.parse::<IpAddr>().is_ok();
        for lease in leases {
            let name = lease.unwrap().file_name().into_string().unwrap();
            assert!(!is_lease(&name), "{name}");
        }
        world.cni.detach("pod0").await.unwrap();
    });
}

#[test]
fn a_point_to_point_network_gives_the_guest_the_routes_that_it_needs() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let world = World::new(&json!({
            "cniVersion": "0.4.0", "name": "test",
            "plugins": [{
                "type": "ptp",
                "ipam": {
                    "type": "host-local", "subnet": "10.88.8.0/24", "dataDir": data.path(),
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }],
        }));
        let attachment = world.attach(Capabilities::new()).await.unwrap();
        let nic = &attachment.nics[0];
        let own: Vec<String> = nic.addresses.iter().map(ToString::to_string).collect();
        // Not /24: the neighbours are reached through the gateway, not on the link.
        assert_eq!(own, ["10.88.8.2/32"]);
        let routes: Vec<(String, Option<String>)> = attachment
            .routes
            .iter()
            .map(|r| {
                (
                    r.destination.to_string(),
                    r.gateway.map(|gw| gw.to_string()),
                )
            })
            .collect();
        let gateway = || Some("10.88.8.1".to_owned());
        assert_eq!(
            routes,
            [
                ("10.88.8.1/32".to_owned(), None),
                ("10.88.8.0/24".to_owned(), gateway()),
                ("0.0.0.0/0".to_owned(), gateway()),
            ]
        );
        world.cni.detach("pod0").await.unwrap();
    });
}

/// A list of one script that gets port mappings.
fn scripted() -> Value {
    json!({
        "cniVersion": "1.0.0", "name": "test",
        "plugins": [
            {"type": "script", "capabilities": {"portMappings": true, "dns": false}},
        ],
    })
}

#[test]
fn plugins_are_told_the_pod_and_the_capabilities_that_they_ask_for() {
    in_host(async || {
        let world = World::new(&scripted());
        let dir = world.dir.path().display();
        world.script(
            "script",
            &format!("cat >{dir}/$CNI_COMMAND; env >{dir}/env; exit 1"),
        );
        let mut capabilities = Capabilities::new();
        capabilities.insert("portMappings".to_owned(), json!([{"hostPort": 80}]));
        capabilities.insert("dns".to_owned(), json!({"servers": ["1.1.1.1"]}));
        let error = world.attach(capabilities).await.unwrap_err();
        assert!(matches!(error, CniError::Failed { .. }), "{error}");
        let config: Value = serde_json::from_str(&world.read("ADD")).unwrap();
        assert_eq!(
            config["runtimeConfig"],
            json!({"portMappings": [{"hostPort": 80}]})
        );
        assert_eq!(config["name"], "test");
        assert_eq!(config["cniVersion"], "1.0.0");
        let env = world.read("env");
        for variable in [
            "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;\
             K8S_POD_INFRA_CONTAINER_ID=pod0;K8S_POD_UID=u-1\n",
            "CNI_CONTAINERID=pod0\n",
            "CNI_IFNAME=eth0\n",
        ] {
            assert!(env.contains(variable), "{env}");
        }
        // ADD failed, and so did the DEL that undoes it: the record stays for another attempt.
        assert_eq!(world.cni.known().unwrap(), ["pod0"]);
        world.script("script", "true");
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
    });
}

#[test]
fn a_plugin_that_failed_is_undone_by_what_the_one_before_it_answered() {
    in_host(async || {
        let list = json!({
            "cniVersion": "1.0.0", "name": "test",
            "plugins": [{"type": "first"}, {"type": "second"}],
        });
        let world = World::new(&list);
        let dir = world.dir.path().display();
        // Without a version, as old plugins print: it is the list's.
        let answer = r#"{"ips":[{"address":"10.0.0.7/8"}]}"#;
        world.script(
            "first",
            &format!("cat >{dir}/first-$CNI_COMMAND; [ $CNI_COMMAND = DEL ] || echo '{answer}'"),
        );
        world.script(
            "second",
            &format!("cat >{dir}/second-$CNI_COMMAND; [ $CNI_COMMAND = DEL ]"),
        );
        let attached = world.attach(Capabilities::new()).await;
        assert!(attached.is_err());
        for told in ["second-ADD", "second-DEL", "first-DEL"] {
            let config: Value = serde_json::from_str(&world.read(told)).unwrap();
            let address = &config["prevResult"]["ips"][0]["address"];
            assert_eq!(address, "10.0.0.7/8", "{told}");
            assert_eq!(config["prevResult"]["cniVersion"], "1.0.0", "{told}");
        }
        assert!(world.is_clean());
    });
}

#[test]
fn a_plugins_own_words_are_told() {
    in_host(async || {
        let world = World::new(&scripted());
        world.script(
            "script",
            r#"[ $CNI_COMMAND = DEL ] && exit 0
               echo '{"cniVersion":"1.0.0","code":11,"msg":"try\u001b again","details":"later"}'
               exit 1"#,
        );
        let error = world.attach(Capabilities::new()).await.unwrap_err();
        let message = error.to_string();
        assert!(message.contains("try  again: later (code 11)"), "{message}");
        assert!(world.is_clean());
    });
}

#[test]
fn nonsense_and_results_for_nobody_are_refused_and_undone() {
    in_host(async || {
        for printed in [
            "nonsense",
            "[]",
            "",
            r#"{"cniVersion":"1.0.0","ips":[{"address":"300.0.0.1/8"}]}"#,
            // Valid, but no interface was created.
            r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.1/8"}]}"#,
        ] {
            let world = World::new(&scripted());
            world.script(
                "script",
                &format!("[ $CNI_COMMAND = DEL ] || echo '{printed}'"),
            );
            let attached = world.attach(Capabilities::new()).await;
            assert!(attached.is_err(), "{printed}");
            assert!(world.is_clean(), "{printed}");
        }
    });
}

#[test]
fn a_plugin_that_hangs_or_floods_is_killed_with_all_that_it_started() {
    in_host(async || {
        let mut world = World::new(&scripted());
        let dir = world.dir.path().display().to_string();
        let hang = format!("[ $CNI_COMMAND = DEL ] && exit; echo $$ >{dir}/pid; sleep 1000; exit");
        world.script("script", &hang);
        // Increased until the script gets as far as hanging.
        let mut limit = Duration::from_secs(1);
        while !world.dir.path().join("pid").exists() {
            world.cni.options.plugin_timeout = limit;
            let error = world.attach(Capabilities::new()).await.unwrap_err();
            assert!(
                matches!(error, CniError::Hangs { command: "ADD", .. }),
                "{error}"
            );
            limit *= 4;
        }
        let pid = world.read("pid");
        assert_eq!(living_of_group(pid.trim()), 0);

        world.cni.options.plugin_timeout = Duration::from_secs(60);
        world.script("script", "[ $CNI_COMMAND = DEL ] || exec yes");
        let error = world.attach(Capabilities::new()).await.unwrap_err();
        assert!(matches!(error, CniError::TooMuchOutput { .. }), "{error}");
        assert!(world.is_clean());
    });
}

#[test]
fn a_plugin_has_more_time_for_many_ports() {
    in_host(async || {
        let mut world = World::new(&scripted());
        world.script("script", "[ $CNI_COMMAND = DEL ] || { sleep 2; exit 1; }");
        world.cni.options.plugin_timeout = Duration::from_secs(1);
        let error = world.attach(Capabilities::new()).await.unwrap_err();
        assert!(matches!(error, CniError::Hangs { .. }), "{error}");
        let port = |number| PortMapping {
            host_port: number,
            pod_port: number,
            protocol: "udp".to_owned(),
            host_ip: String::new(),
        };
        let ports: Vec<_> = (30000..30200).map(port).collect();
        let error = world.attach(port_mappings(&ports).into_iter().collect());
        let error = error.await.unwrap_err();
        assert!(matches!(error, CniError::Failed { .. }), "{error}");
    });
}

#[tokio::test]
async fn a_check_that_nobody_needs_waits_for_no_plugin() {
    let world = World::new(&scripted());
    let cached = Cached::new(
        pod(),
        &world.cni.network("test").unwrap(),
        world.cni.netns("pod0"),
        Capabilities::new(),
    );
    world.cni.cache.put(&cached).unwrap();
    let mut input = Input::take(&world.cni.cache.input("pod0"), Duration::ZERO)
        .await
        .unwrap();
    let _of_a_plugin = input.lend(b"{}").unwrap();
    let checked = world.cni.check("pod0", std::future::ready(())).await;
    assert!(matches!(checked, Err(CniError::Unchecked)), "{checked:?}");
}

/// Runs `blocked` as a task on the only worker, which waits for what `other` does.
fn on_one_worker(
    blocked: impl Future<Output = ()> + Send + 'static,
    other: impl FnOnce() + Send + 'static,
) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().unwrap();
    let (sender, receiver) = mpsc::channel();
    runtime.spawn(async move {
        tokio::spawn(async move { other() });
        blocked.await;
        sender.send(())
    });
    let done = receiver.recv_timeout(Duration::from_secs(60));
    runtime.shutdown_background();
    done.expect("no other task went on");
}

#[test]
fn other_tasks_go_on_while_disks_are_waited_for() {
    let world = Arc::new(World::new(&scripted()));
    world.script("script", "true");
    let cache = world.dir.path().join("cache");
    // Opening a named pipe blocks until its other end is opened.
    let pipe = |name: &str| {
        let path = cache.join(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        path
    };
    let prepared = world.cni.prepare("pod0").unwrap();
    let node = Arc::clone(&world);
    let attach = async move {
        let pod = pod();
        let attached = node.cni.attach(&pod, Capabilities::new(), prepared);
        // A pipe cannot be synced.
        assert!(matches!(attached.await, Err(CniError::Io { .. })));
    };
    let written = pipe("pod0.tmp");
    on_one_worker(attach, move || drop(fs::read(written).unwrap()));

    let node = Arc::clone(&world);
    let detach = async move { node.cni.detach("pod0").await.unwrap() };
    let read = pipe("pod0.json");
    on_one_worker(detach, move || fs::write(read, "damaged").unwrap());
}

#[tokio::test]
async fn names_that_would_be_taken_for_more_arguments_are_refused() {
    let world = World::new(&scripted());
    let mut pod = pod();
    pod.name = "a;K8S_POD_UID=0".to_owned();
    let prepared = world.cni.prepare("pod0").unwrap();
    let attached = world.cni.attach(&pod, Capabilities::new(), prepared);
    let error = attached.await.unwrap_err();
    assert!(
        matches!(error, CniError::InvalidIdentity { field: "name", .. }),
        "{error}"
    );
    assert!(world.is_clean());
}

#[tokio::test]
async fn a_missing_plugin_is_told_before_a_pod_needs_it() {
    let world = World::new(&scripted());
    let error = world.cni.ready().await.unwrap_err().to_string();
    assert!(error.contains("no CNI plugin \"script\""), "{error}");
}
