'use strict'

// Makes a project and jobs that call this program back each minute, counts the callbacks of each job, and tells once a
// minute how many jobs have been called how often. It speaks scheduler0's API and knows nothing of Penstock.

const axios = require('axios')
const express = require('express')

const endpoint = process.env.API_ENDPOINT || 'http://127.0.0.1:8080'
const jobs = Number(process.env.JOBS || 50000)
const minutes = Number(process.env.MINUTES || 5)
const port = Number(process.env.PORT || 3000)
const quietSeconds = 5 // without a callback: all of one minute have come

const api = axios.create({
  baseURL: endpoint,
  maxBodyLength: Infinity,
  maxContentLength: Infinity,
  headers: { 'x-api-key': process.env.API_KEY, 'x-secret-key': process.env.API_SECRET }
})

const counts = new Map() // job id -> callbacks
const seen = new Set() // execution ids of the last two minutes or so
let posts = 0
let repeated = 0
let last = 0 // when a callback came
let began = 0 // when the first one of this minute did

const app = express()
app.use(express.json({ limit: '3mb' }))
app.post('/callback', (request, response) => {
  response.sendStatus(204)
  posts += 1
  const now = Date.now()
  if (now - last > quietSeconds * 1000) began = now
  last = now
  for (const job of request.body) {
    if (seen.has(job.executionId)) {
      repeated += 1
      continue
    }
    seen.add(job.executionId)
    if (seen.size > 3 * jobs) seen.delete(seen.values().next().value)
    counts.set(job.id, (counts.get(job.id) || 0) + 1)
  }
})

function histogram () {
  const found = {}
  for (const count of counts.values()) found[count] = (found[count] || 0) + 1
  return found
}

function tell (what) {
  console.log(new Date().toISOString(), what, `jobs called: ${counts.size} of ${jobs}, posts: ${posts},`,
    `repeated: ${repeated}, the newest within ${((last - began) / 1000).toFixed(1)} s,`,
    'callbacks -> jobs:', JSON.stringify(histogram()))
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000))

async function makeJobs () {
  const { data: { data: project } } = await api.post('/v1/projects', {
    name: `counting ${new Date().toISOString()}`,
    description: 'calls back each minute'
  })
  const payload = []
  for (let n = 0; n < jobs; n++) {
    payload.push({
      projectId: project.id,
      spec: '@every 1m',
      timezone: 'America/New_York',
      executionType: 'http',
      data: JSON.stringify({ number: n }),
      callbackUrl: `http://localhost:${port}/callback`
    })
  }
  const accepted = await api.post('/v1/jobs', payload)
  console.log(`${jobs} jobs were accepted: ${accepted.headers.location}`)
  for (;;) { // a held answer tells of a change, not yet of the end
    const { data: { data: task } } = await api.get(`/v1${accepted.headers.location}`)
    if (task.state === 2) return JSON.parse(task.output).length
    if (task.state === 3) throw new Error(task.output)
  }
}

async function main () {
  console.log(`${await makeJobs()} jobs are made`)
  const reports = setInterval(() => tell('each minute'), 60000)
  while (counts.size < jobs) await pause(1)
  await pause(minutes * 60 - 30)
  while (Date.now() - last < quietSeconds * 1000) await pause(1)
  clearInterval(reports)
  tell('at the end')
  const same = Object.keys(histogram()).length === 1
  console.log(same ? 'every job was called back as often as any other' : 'JOBS WERE CALLED BACK UNEQUALLY OFTEN')
  process.exit(same ? 0 : 1)
}

app.listen(port, () => main().catch((error) => {
  console.error(error.response ? error.response.data : error)
  process.exit(1)
}))
