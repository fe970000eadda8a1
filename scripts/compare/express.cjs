// The same small service behind the npm package express-idempotency, with its defaults (store: memory).
//
//   node express.cjs PORT EFFECTS_FILE
const fs = require('fs');
const express = require('express');
const { idempotency, getSharedIdempotencyService } = require('express-idempotency');

const [port, file] = process.argv.slice(2);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const app = express();
let balance = true;

app.use(express.json({ limit: '5mb' }));
app.use((req, res, next) => {
    if (!/^Bearer [^:]+:.+$/.test(req.get('authorization') || '')) return res.status(401).json({ error: 'unauthenticated' });
    next();
});
app.put('/balance', (req, res) => res.json({ balance: (balance = req.body.balance) }));
app.post(['/payments', '/refunds'], idempotency(), async (req, res) => {
    // The package calls the handler also where it has answered.
    if (getSharedIdempotencyService().isHit(req)) return;
    const { reference, amount, mode } = req.body;
    if (!(amount > 0)) return res.status(400).json({ error: 'amount' });
    if (mode === 'fail') return res.status(500).json({ error: 'failed before any effect' });
    if (!balance) return res.status(402).json({ error: 'insufficient funds' });
    const id = Math.random().toString(36).slice(2);
    if (mode === 'slow') await sleep(700);
    fs.appendFileSync(file, reference + '\n');
    if (mode === 'late') await sleep(3000);
    res.status(201).location('/payments/' + id).json({ id, reference, amount });
});
app.listen(Number(port), '127.0.0.1', () => console.log('listening'));
