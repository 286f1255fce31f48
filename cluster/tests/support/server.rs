//! Starts etcd and kube-apiserver.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kube::{Client, Config};
use tokio_tungstenite::tungstenite::{self, client::IntoClientRequest};

use super::certificates::{Authority, Files};
use super::requests::Requests;

/// How long the server may take to be ready on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);

/// Another program may take a port between its choice and its use.
const ATTEMPTS: u32 = 3;

/// The user of [`Server::admin`].
const ADMIN: &str = "admin";

/// A WebSocket through the API server.
pub type WebSocket =
    tokio_tungstenite::WebSocketStream<tokio_rustls::client::TlsStream<tokio::net::TcpStream>>;

/// Every request, without its content.
const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
";

/// A running API server with its etcd.
pub struct Server {
    directory: PathBuf,
    authority: Authority,
    port: u16,
    admin: Files,
    front_proxy: Files,
    clients: AtomicU32,
    children: Mutex<Vec<Child>>,
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub fn start() -> Result<Self> {
        let bin = programs()?;
        let base = Path::new(env!("CARGO_TARGET_TMPDIR"));
        remove_left_over(base);
        let mut last = None;
        for attempt in 0..ATTEMPTS {
            let directory = base.join(format!("api-server-{}-{attempt}", std::process::id()));
            match Self::start_in(&bin, directory) {
                Ok(server) => return Ok(server),
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("it was not tried")?)
    }

    fn start_in(bin: &Path, directory: PathBuf) -> Result<Self> {
        fs::create_dir_all(&directory)?;
        let authority = Authority::new(&directory)?;
        let admin = authority.client("admin", ADMIN, &["system:masters"])?;
        // Who speaks for users to aggregated servers, such as the one of our subresources.
        let front_proxy = authority.client("front-proxy", "front-proxy-client", &[])?;
        let ports = Ports::choose()?;
        let mut server = Self {
            port: ports.api_server,
            directory,
            authority,
            admin,
            front_proxy,
            clients: AtomicU32::new(0),
            children: Mutex::new(Vec::new()),
        };
        let etcd = server.etcd(bin, &ports);
        server.spawn("etcd", etcd)?;
        let api_server = server.api_server(bin, &ports)?;
        server.spawn("kube-apiserver", api_server)?;
        server.wait_until_ready()?;
        Ok(server)
    }

    fn etcd(&self, bin: &Path, ports: &Ports) -> Command {
        let client = format!("http://127.0.0.1:{}", ports.etcd);
        let peer = format!("http://127.0.0.1:{}", ports.etcd_peer);
        let mut command = tied(&bin.join("etcd"));
        command
            .arg("--data-dir")
            .arg(self.directory.join("etcd"))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            // Nothing survives the tests.
            .arg("--unsafe-no-fsync")
            .args(["--log-level", "warn"]);
        command
    }

    fn api_server(&self, bin: &Path, ports: &Ports) -> Result<Command> {
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"];
        let tls = self.authority.server("kube-apiserver", &names)?;
        let (private, public) = self.authority.token_key()?;
        let policy = self.directory.join("audit.yaml");
        fs::write(&policy, AUDIT_POLICY)?;
        let ca = self.authority.certificate();
        let mut command = tied(&bin.join("kube-apiserver"));
        let mut flag = |name: &str, value: &Path| {
            command.arg(format!("--{name}={}", value.display()));
        };
        flag("cert-dir", &self.directory);
        flag("tls-cert-file", &tls.certificate);
        flag("tls-private-key-file", &tls.key);
        flag("client-ca-file", &ca);
        flag("service-account-key-file", &public);
        flag("service-account-signing-key-file", &private);
        flag("requestheader-client-ca-file", &ca);
        flag("proxy-client-cert-file", &self.front_proxy.certificate);
        flag("proxy-client-key-file", &self.front_proxy.key);
        flag("audit-policy-file", &policy);
        flag("audit-log-path", &self.audit_log());
        command
            .arg(format!("--etcd-servers=http://127.0.0.1:{}", ports.etcd))
            .arg(format!("--secure-port={}", ports.api_server))
            .args([
                "--bind-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--service-account-issuer=https://kubernetes.default.svc",
                // Kubelets are known as in a cluster.
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--requestheader-allowed-names=front-proxy-client",
                "--requestheader-username-headers=X-Remote-User",
                "--requestheader-group-headers=X-Remote-Group",
                "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                // Nobody here makes the accounts of namespaces.
                "--disable-admission-plugins=ServiceAccount",
            ]);
        Ok(command)
    }

    fn spawn(&self, name: &str, mut command: Command) -> Result<()> {
        let log = File::create(self.log(name))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("failed to start {name}"))?;
        self.children.lock().expect("no panic").push(child);
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.log"))
    }

    fn audit_log(&self) -> PathBuf {
        self.directory.join("audit.log")
    }

    /// Asks the server until it says that it is ready: it has no other sign of it.
    fn wait_until_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let client = Client::try_from(self.config(&self.admin)?)?;
            loop {
                let request = http::Request::get("/readyz").body(Vec::new())?;
                let answer = client.request_text(request).await;
                if answer.is_ok_and(|text| text == "ok") {
                    return super::definitions::install(&client).await;
                }
                self.check_children()?;
                if began.elapsed() > LIMIT {
                    bail!(
                        "kube-apiserver is not ready after {} s; its log is {}",
                        LIMIT.as_secs(),
                        self.log("kube-apiserver").display()
                    );
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    }

    fn check_children(&self) -> Result<()> {
        for child in self.children.lock().expect("no panic").iter_mut() {
            if let Some(status) = child.try_wait()? {
                let log = |name| fs::read_to_string(self.log(name)).unwrap_or_default();
                let text = log("etcd") + &log("kube-apiserver");
                let lines: Vec<_> = text.lines().collect();
                let tail = lines[lines.len().saturating_sub(5)..].join("\n");
                bail!("etcd or kube-apiserver ended ({status}):\n{tail}");
            }
        }
        Ok(())
    }

    fn config(&self, files: &Files) -> Result<Config> {
        let url = format!("https://127.0.0.1:{}", self.port).parse()?;
        let mut config = Config::new(url);
        config.root_cert = Some(vec![self.authority.der()]);
        let text = |path: &Path| path.display().to_string();
        config.auth_info.client_certificate = Some(text(&files.certificate));
        config.auth_info.client_key = Some(text(&files.key));
        Ok(config)
    }

    /// Returns a client that may do everything. Its requests are not those of the system.
    pub fn admin(&self) -> Client {
        let config = self.config(&self.admin).expect("the address is one");
        Client::try_from(config).expect("the certificates are right")
    }

    /// Returns a client for a user of some groups; RBAC decides what it may do.
    pub fn client(&self, user: &str, groups: &[&str]) -> Client {
        let number = self.clients.fetch_add(1, Ordering::Relaxed);
        let files = self
            .authority
            .client(&format!("client-{number}"), user, groups)
            .expect("the certificate is issued");
        let config = self.config(&files).expect("the address is one");
        Client::try_from(config).expect("the certificates are right")
    }

    /// Returns a client for the kubelet of a node.
    pub fn kubelet(&self, node: &str) -> Client {
        self.client(&format!("system:node:{node}"), &["system:nodes"])
    }

    /// Writes the kubeconfig of a node's kubelet; returns its path.
    pub fn kubeconfig(&self, node: &str) -> PathBuf {
        let user = format!("system:node:{node}");
        let files = self
            .authority
            .client(&format!("kubelet-{node}"), &user, &["system:nodes"])
            .expect("the certificate is issued");
        self.write_kubeconfig(&format!("kubelet-{node}"), &files, "default")
    }

    /// Writes a user's kubeconfig for a namespace; returns its path. RBAC decides what it may do.
    pub fn user_kubeconfig(&self, user: &str, namespace: &str) -> PathBuf {
        let name = format!("{user}-{namespace}");
        let files = self
            .authority
            .client(&name, user, &[])
            .expect("the certificate is issued");
        self.write_kubeconfig(&name, &files, namespace)
    }

    /// Writes the kubeconfig of who may do everything; returns its path.
    pub fn admin_kubeconfig(&self, namespace: &str) -> PathBuf {
        self.write_kubeconfig(&format!("admin-{namespace}"), &self.admin, namespace)
    }

    fn write_kubeconfig(&self, name: &str, files: &Files, namespace: &str) -> PathBuf {
        let text = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": {
                "server": format!("https://127.0.0.1:{}", self.port),
                "certificate-authority": self.authority.certificate(),
            } }],
            "users": [{ "name": "u", "user": {
                "client-certificate": files.certificate,
                "client-key": files.key,
            } }],
            "contexts": [{ "name": "x", "context": {
                "cluster": "c", "user": "u", "namespace": namespace,
            } }],
            "current-context": "x",
        });
        let path = self.directory.join(format!("{name}.conf"));
        fs::write(&path, text.to_string()).expect("the directory can be written");
        path
    }

    /// Connects a WebSocket as the user of [`Self::admin`]; an error is the answer's code.
    pub async fn websocket(&self, path: &str, protocol: &str) -> Result<WebSocket, u16> {
        let tls = self.authority.tls(&self.admin);
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        let stream = stream.await.expect("the server listens");
        let name = "localhost".try_into().expect("a name");
        let stream = tls.connect(name, stream).await.expect("a TLS handshake");
        let mut request = format!("wss://localhost:{}{path}", self.port)
            .into_client_request()
            .expect("a URL");
        let protocol = protocol.parse().expect("a header's value");
        request
            .headers_mut()
            .insert("sec-websocket-protocol", protocol);
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, _)) => Ok(socket),
            Err(tungstenite::Error::Http(answer)) => Err(answer.status().as_u16()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns a client for a service account, which need not exist.
    pub fn service_account(&self, namespace: &str, name: &str) -> Client {
        let user = format!("system:serviceaccount:{namespace}:{name}");
        let groups = [
            "system:serviceaccounts",
            &format!("system:serviceaccounts:{namespace}"),
        ];
        self.client(&user, &groups)
    }

    /// Returns the authority that the server trusts for clients and front proxies.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Counts the requests that a user has made so far.
    pub fn requests(&self, user: &str) -> Requests {
        let text = fs::read_to_string(self.audit_log()).expect("the server logs all requests");
        Requests::of(&text, user)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in self.children.lock().expect("no panic").iter_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // The logs of a failed start are worth reading.
        if !std::thread::panicking() {
            let _ = fs::remove_dir_all(self.directory.join("etcd"));
        }
    }
}

/// Free ports of the loopback interface.
struct Ports {
    etcd: u16,
    etcd_peer: u16,
    api_server: u16,
}

impl Ports {
    fn choose() -> Result<Self> {
        let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let sockets = [listen()?, listen()?, listen()?];
        let port = |index: usize| sockets[index].local_addr().map(|address| address.port());
        Ok(Self {
            etcd: port(0)?,
            etcd_peer: port(1)?,
            api_server: port(2)?,
        })
    }
}

/// Returns the directory of the programs.
fn programs() -> Result<PathBuf> {
    let bin = bin();
    for name in ["etcd", "kube-apiserver"] {
        ensure!(
            bin.join(name).is_file(),
            "{} is missing: `cargo xtask cluster` builds it",
            bin.join(name).display()
        );
    }
    Ok(bin)
}

/// Returns the directory of what `cargo xtask cluster` builds.
pub fn bin() -> PathBuf {
    std::env::var_os("PODVISOR_CLUSTER_BIN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cluster/bin"),
        PathBuf::from,
    )
}

/// Returns a command that the kernel kills when the thread that starts it ends.
pub(super) fn tied(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Removes what programs left that were killed or that ended: a static is never dropped.
fn remove_left_over(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name
            .strip_prefix("api-server-")
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
