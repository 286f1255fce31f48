//! Networks of containers, through the real binary and CNI's real plugins. These tests need a KVM
//! that runs guests; they do not assert times.

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::json;
use support::host::{Host, command, kill, networks_left, own_address, sandboxes};
use support::{PATIENCE, Ran, until};
use tempfile::TempDir;

/// The bridge's address, by which guests connect to the host.
const GATEWAY: &str = "10.209.0.1";

/// Prints `up`, answers each line of a TCP connection to 8080 with another one, and echoes each
/// datagram to 5353.
const SERVER: &str = r#"
    $SIG{CHLD} = "IGNORE"; $| = 1;
    sub at { pack("S n a4 x8", 2, $_[0], "\0\0\0\0") }
    socket(U, 2, 2, 17) && bind(U, at(5353)) or die $!;
    socket(T, 2, 1, 6) && bind(T, at(8080)) && listen(T, 9) or die $!;
    print "up\n";
    if (fork) { while (accept(C, T)) { <C>; print C "hello from the guest\n"; close(C) } }
    else { while (defined($from = recv(U, $b, 999, 0))) { send(U, $b, 0, $from) } }
"#;

/// Creates a host whose image has perl, too.
fn host() -> Host {
    Host::with(|tree| {
        let libraries = command("ldd", &["/usr/bin/perl"]);
        let paths = libraries
            .split_whitespace()
            .filter(|word| word.starts_with('/'));
        for path in paths.chain(["/usr/bin/perl"]) {
            let to = tree.join(path.trim_start_matches('/'));
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(path, to).unwrap();
        }
    })
}

/// Starts a container that serves, and waits until it does.
fn serve(host: &Host, name: &str, flags: &[&str]) -> String {
    let flags = [&["--name", name], flags].concat();
    let id = host.start_program(&flags, &["/usr/bin/perl", "-e", SERVER]);
    host.logs_with(name, "up");
    id
}

/// Returns a TCP server's answer to a line. Debian's passt forwards nothing from a server before
/// the client has sent something.
fn said(address: &str) -> String {
    let address: SocketAddr = address.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)
        .unwrap_or_else(|error| panic!("{address}: {error}"));
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"x\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Returns whether a UDP server echoes a datagram. Datagrams may be lost.
fn echoes(address: &str) -> bool {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    socket.connect(address).unwrap();
    (0..20).any(|_| {
        let mut answer = [0; 9];
        // Refused while there is no listener.
        let _ = socket.send(b"datagram");
        socket
            .recv(&mut answer)
            .is_ok_and(|len| &answer[..len] == b"datagram")
    })
}

/// Starts a server on the host that sends `hello from the host` to every client.
fn host_server() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            stream.unwrap().write_all(b"hello from the host\n").unwrap();
        }
    });
    port
}

#[test]
fn guest_containers_on_the_bridge_reach_the_host_each_other_and_are_reached() {
    let host = host();
    let outside = host_server();
    let ports = ["-p", "18080:8080", "-p", "15353:5353/udp"];
    let web = serve(&host, "web", &[&["--network", "nat"][..], &ports].concat());
    let inspect = host.json(&["inspect", "web"]);
    let network = &inspect[0]["NetworkSettings"];
    let address = network["IPAddress"].as_str().unwrap().to_owned();
    assert!(address.starts_with("10.209."), "{network}");
    assert_eq!(network["Gateway"], GATEWAY);
    assert_eq!(network["Networks"]["nat"]["IPAddress"], address.as_str());
    let bound = json!([{"HostIp": "0.0.0.0", "HostPort": "18080"}]);
    assert_eq!(network["Ports"]["8080/tcp"], bound);
    assert!(Path::new(network["SandboxKey"].as_str().unwrap()).exists());

    // From the host: by the container's address, and by the host's published ports.
    let hello = "hello from the guest\n";
    assert_eq!(said(&format!("{address}:8080")), hello);
    assert_eq!(said(&format!("{GATEWAY}:18080")), hello);
    assert_eq!(said("127.0.0.1:18080"), hello);
    assert!(echoes(&format!("{address}:5353")));
    assert!(echoes(&format!("{GATEWAY}:15353")));

    host.podvisor(&["port", "web"])
        .printed("8080/tcp -> 0.0.0.0:18080\n5353/udp -> 0.0.0.0:15353\n");
    host.podvisor(&["port", "web", "5353/udp"])
        .printed("0.0.0.0:15353\n");
    host.podvisor(&["port", "web", "80"])
        .refused(1, &["80/tcp", "web"]);
    let ps = host.podvisor(&["ps"]).stdout;
    assert!(
        ps.contains("0.0.0.0:18080->8080/tcp, 0.0.0.0:15353->5353/udp"),
        "{ps}"
    );
    let ps = host.json(&["ps", "--json"]);
    assert_eq!(ps[0]["Ports"][1]["host_port"], 15353);
    let taken = ["run", "--network", "nat", "-p", "18080:80", "box", "true"];
    host.podvisor(&taken).refused(125, &["18080", "web"]);
    let port = outside.to_string();
    let taken = [
        "run",
        "--network",
        "nat",
        "-p",
        &format!("{port}:80"),
        "box",
        "true",
    ];
    host.podvisor(&taken)
        .refused(125, &[&port, "choose another"]);

    // From a second one without a network flag, with root's default network.
    let mut command = host
        .root
        .podvisor(&["run", "-d", "--name", "client", "--memory", "128M"]);
    command.args([
        "-e",
        "PATH=/bin",
        "--hostname",
        "client",
        "box",
        "sleep",
        "99999",
    ]);
    command.env_remove("PODVISOR_NETWORK");
    let ran = Ran::new(command.output().unwrap());
    assert_eq!((ran.code, &*ran.stderr), (Some(0), ""), "{ran:?}");
    let sh = |script: &str| {
        let ran = host.podvisor(&["exec", "-e", "PATH=/bin", "client", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stdout
    };
    assert_eq!(sh(&format!("nc -w 60 {address} 8080 </dev/null")), hello);
    assert_eq!(sh(&format!("nc -w 60 {GATEWAY} 18080 </dev/null")), hello);
    let from_host = sh(&format!("nc -w 60 {GATEWAY} {outside} </dev/null"));
    assert_eq!(from_host, "hello from the host\n");
    let own = host.json(&["inspect", "client"])[0]["NetworkSettings"]["IPAddress"].clone();
    let hosts = sh("cat /etc/hosts");
    assert!(
        hosts.contains(&format!("{}\tclient\n", own.as_str().unwrap())),
        "{hosts}"
    );

    // However a machine ends, the next command removes its network.
    let inspect = host.json(&["inspect", "client"]);
    let netns = inspect[0]["NetworkSettings"]["SandboxKey"].clone();
    kill(
        inspect[0]["State"]["Pid"]
            .as_u64()
            .unwrap()
            .try_into()
            .unwrap(),
    );
    until("the end of one machine", || sandboxes().len() == 1);
    host.podvisor(&["ps"]);
    assert!(!Path::new(netns.as_str().unwrap()).exists());
    let inspect = host.json(&["inspect", "client"]);
    assert_eq!(inspect[0]["NetworkSettings"]["IPAddress"], "");
    host.podvisor(&["rm", "client"]).printed("client\n");
    assert_eq!(said("127.0.0.1:18080"), hello);

    // `stop` removes it immediately.
    host.podvisor(&["stop", "-t", "1", "web"]).printed("web\n");
    assert_eq!(networks_left(), [""; 0]);
    assert!(
        !host
            .root
            .path()
            .join("c")
            .join(&web[..12])
            .join("cni")
            .exists()
    );
    host.podvisor(&["port", "web"]).printed("");
    host.podvisor(&["rm", "web"]).printed("web\n");
}

/// Networks of the host that are bridges with these subnets: `podvisor-test` publishes ports,
/// `podvisor-plain` does not. They are removed when this is dropped.
struct Bridges {
    dir: TempDir,
}

/// Where CNI networks are by default.
const NETWORKS: &str = "/etc/cni/net.d";

/// The address of a bridge.
const BRIDGE: &str = "10.94.7.1";

impl Bridges {
    const NAMES: [&str; 2] = ["podvisor-test", "podvisor-plain"];

    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(NETWORKS).unwrap();
        for name in Self::NAMES {
            let bridge = json!({
                "type": "bridge", "bridge": "br-podvisor", "isGateway": true,
                "ipam": {
                    "type": "host-local", "ranges": [[{"subnet": "10.94.7.0/24"}]],
                    "dataDir": dir.path(), "routes": [{"dst": "0.0.0.0/0"}],
                },
            });
            let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
            let plugins = match name {
                "podvisor-test" => vec![bridge, portmap],
                _ => vec![bridge],
            };
            let list = json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins});
            fs::write(Self::file(name), list.to_string()).unwrap();
        }
        Self { dir }
    }

    fn file(name: &str) -> PathBuf {
        Path::new(NETWORKS).join(format!("99-{name}.conflist"))
    }

    /// Returns the remains of containers in these networks.
    fn left(&self) -> Vec<String> {
        let mut left = networks_left();
        for name in Self::NAMES {
            let addresses = fs::read_dir(self.dir.path().join(name))
                .into_iter()
                .flatten();
            let addresses =
                addresses.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            left.extend(addresses.filter(|name| name.starts_with("10.")));
        }
        let rules = command("iptables-save", &[]);
        let of_one = |rule: &&str| rule.starts_with("-A") && rule.contains("10.94.7.");
        left.extend(rules.lines().filter(of_one).map(str::to_owned));
        left
    }
}

impl Drop for Bridges {
    fn drop(&mut self) {
        for name in Self::NAMES {
            let _ = fs::remove_file(Self::file(name));
        }
        // It is not there if no container was.
        let _ = Command::new("ip")
            .args(["link", "delete", "br-podvisor"])
            .output();
    }
}

#[test]
fn guest_container_in_the_foreground_is_on_a_network_of_the_hosts() {
    let host = host();
    let bridges = Bridges::new();
    let plain = ["run", "--network", "podvisor-plain"];
    let ports = ["-p", "80:80", "box", "true"];
    host.podvisor(&[&plain[..], &ports].concat())
        .refused(125, &["--publish", "podvisor-plain", "portmap"]);
    assert_eq!(bridges.left(), [""; 0]);

    let flags = ["run", "--rm", "--name", "web", "--memory", "128M"];
    let network = ["--network", "podvisor-test", "--dns", "192.0.2.53"];
    let program = ["-p", "18083:8080", "box", "/usr/bin/perl", "-e", SERVER];
    let run = [&flags[..], &network, &program].concat();
    let mut run = host.root.podvisor(&run);
    let mut run = run.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    let network = &host.json(&["inspect", "web"])[0]["NetworkSettings"];
    let address = network["Networks"]["podvisor-test"]["IPAddress"].clone();
    let address = address.as_str().unwrap();
    assert!(address.starts_with("10.94.7."), "{network}");
    assert_eq!(network["Gateway"], BRIDGE);
    let hello = "hello from the guest\n";
    assert_eq!(said(&format!("{address}:8080")), hello);
    assert_eq!(said("127.0.0.1:18083"), hello);
    assert!(echoes(&format!("{address}:5353")));
    let files = ["exec", "-e", "PATH=/bin", "web", "sh", "-c"];
    let script = "cat /etc/resolv.conf; ip route";
    let ran = host.podvisor(&[&files[..], &[script]].concat());
    let has = |line: &str| ran.stdout.lines().any(|is| is.starts_with(line));
    assert!(
        has("nameserver 192.0.2.53") && has(&format!("default via {BRIDGE}")),
        "{ran:?}"
    );
    host.podvisor(&["stop", "-t", "1", "web"]).printed("web\n");
    assert_eq!(run.wait().unwrap().code(), Some(137));
    assert_eq!(bridges.left(), [""; 0]);
    host.leaves_nothing();
}

#[test]
fn guest_programs_run_without_a_network_where_nobody_can_make_one() {
    let host = Host::default();
    let unknown = ["run", "--network", "no-such", "box", "true"];
    host.podvisor(&unknown)
        .refused(125, &["no-such", "/etc/cni/net.d"]);
    // A host without plugins.
    let podvisor = |flags: &[&str]| {
        let hide = "mount -t tmpfs none /usr/lib/cni && exec \"$@\"";
        let inner = host.root.podvisor(flags);
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", hide, "sh"])
            .arg(inner.get_program());
        command
            .args(inner.get_args())
            .env("PODVISOR_ROOT", host.root.path());
        command
            .env("PODVISOR_BOOT_TIMEOUT", "900")
            .env("PODVISOR_BOOT", "cold");
        Ran::new(command.output().unwrap())
    };
    let words = ["containernetworking-plugins", "--network none"];
    podvisor(&["run", "--network", "nat", "box", "true"]).refused(125, &words);
    podvisor(&["run", "-p", "80:80", "box", "true"]).refused(125, &words);
    let run = ["run", "--rm", "--memory", "128M", "box", "/bin/true"];
    podvisor(&run).refused(0, &["no network", "containernetworking-plugins"]);
}

/// Starts a server that reads as many bytes of each client as its first line says, and confirms
/// them.
fn counter() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let mut bytes = vec![0; line.trim().parse().unwrap()];
            reader.read_exact(&mut bytes).unwrap();
            writeln!(reader.get_mut(), "{} bytes", bytes.len()).unwrap();
        }
    });
    port
}

/// Returns the number of running programs of this name.
fn running(name: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let is_it = |stat: &String| {
        let (_, rest) = stat.split_once('(').unwrap();
        rest.starts_with(name) && !rest.contains(") Z")
    };
    stats.filter(is_it).count()
}

#[test]
fn guest_network_of_a_user_goes_out_and_is_reached_by_ports() {
    let host = host();
    let address = own_address();
    let outside = counter();
    let hello = "hello from the guest\n";
    let sends = |name: &str, bytes: u32| {
        // Debian's passt does not report the server's end to a client that has closed its own side.
        let script = format!(
            r#"socket(S, 2, 1, 6); connect(S, pack("S n a4 x8", 2, {outside},
               pack("C4", split(/\./, "{address}")))) or die $!;
               syswrite(S, "{bytes}\n" . "x" x {bytes}); print scalar(<S>)"#
        );
        let exec = ["exec", name, "/usr/bin/perl", "-e", &script];
        host.podvisor(&exec).printed(&format!("{bytes} bytes\n"));
    };
    let warm = ["--network", "user", "--boot", "warm"];
    let ports = ["-p", "18081:8080", "-p", "15354:5353/udp"];
    let first = serve(&host, "first", &[&warm[..], &ports].concat());
    assert_eq!(said("127.0.0.1:18081"), hello);
    assert_eq!(said(&format!("{address}:18081")), hello);
    assert!(echoes(&format!("{address}:15354")));
    // More than the socket to passt accepts in one write.
    sends("first", 3_000_000);
    let inspect = host.json(&["inspect", "first"]);
    let network = &inspect[0]["NetworkSettings"];
    assert_eq!(network["Networks"]["user"]["IPAddress"], "10.0.2.15");
    host.podvisor(&["port", "first", "8080"])
        .printed("0.0.0.0:18081\n");
    let run = ["run", "--network", "user", "-p", "18081:1", "box", "true"];
    host.podvisor(&run).refused(125, &["18081"]);

    // Templates have such cards, too.
    let templates = host.root.path().join("templates");
    let is_complete = |dir: fs::DirEntry| {
        let name = dir.file_name().into_string().unwrap();
        !name.starts_with('.') && dir.path().join("state").exists()
    };
    until("a template", || {
        fs::read_dir(&templates).is_ok_and(|dirs| dirs.flatten().any(is_complete))
    });
    let second = serve(
        &host,
        "second",
        &[&warm[..], &["-p", "18082:8080"]].concat(),
    );
    let log = host
        .root
        .path()
        .join("c")
        .join(&second[..12])
        .join("sandbox.log");
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("is_clone=true"), "{log}");
    assert_eq!(said("127.0.0.1:18082"), hello);
    sends("second", 1000);

    // The passt process of a machine ends with it.
    until("nobody's network but theirs", || running("passt") == 2);
    let inspect = host.json(&["inspect", &first]);
    kill(
        inspect[0]["State"]["Pid"]
            .as_u64()
            .unwrap()
            .try_into()
            .unwrap(),
    );
    host.podvisor(&["stop", "-t", "1", "second"])
        .printed("second\n");
    until("the end of both networks", || running("passt") == 0);
    host.podvisor(&["rm", "-f", "first", "second"])
        .printed("first\nsecond\n");
    assert_eq!(networks_left(), [""; 0]);
}
