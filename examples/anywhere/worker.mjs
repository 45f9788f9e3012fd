// A worker of a hub's queue in JavaScript (Node 18 or later, Deno, a browser), over HTTP.
//   atoll ticket new --role program             prints atoll://HOST:PORT/SECRET~MARK
//   node worker.mjs http://HOST:PORT SECRET
// A hub with its own authority: NODE_EXTRA_CA_CERTS=ca.pem, https://...
const [hub, secret] = process.argv.slice(2);
let token = "";

async function ask(verb, body) {
  const answer = await fetch(`${hub}/api/${verb}`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(`${found.error.what}: ${found.error.given ?? ""}`);
  return found;
}

({ token } = await ask("login", { secret, name: "worker" }));
const queue = "pool/numbers";
for (const n of [2, 3, 4]) await ask("queues/put", { queue, key: `n${n}`, value: { n } });

let sum = 0;
for (;;) {
  const { items } = await ask("queues/claim", { queue, lease_s: 60, limit: 10, wait_s: 0.2 });
  if (!items.length) break;
  for (const item of items) {
    sum += item.value.n ** 2;
    await ask("queues/ack", { queue, lease: item.lease });
  }
}
await ask("topics/publish", { topic: "pool/sums", items: [{ value: { sum } }] });
console.log(`sum of squares: ${sum}`);
