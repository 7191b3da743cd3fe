package penstock

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// queueOf is a results queue that takes messages of so many bytes; it returns its address and the entries that it has taken,
// but for run times.
func queueOf(t *testing.T, limit int) (string, func() []string) {
	var mu sync.Mutex
	var taken []string
	server := httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		var call struct{ Entries []batchEntry }
		body, _ := io.ReadAll(request.Body)
		if err := json.Unmarshal(body, &call); err != nil {
			t.Error(err)
		}
		total := 0
		for _, one := range call.Entries {
			total += len(one.MessageBody)
		}
		if total > 1<<20 {
			answer.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(answer, `{"__type":"com.amazonaws.sqs#BatchRequestTooLong","message":"more than 1048576 bytes"}`)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		done, failed := []map[string]any{}, []map[string]any{}
		for _, one := range call.Entries {
			if len(one.MessageBody) > limit {
				message := fmt.Sprintf("Message must be shorter than %d bytes.", limit)
				failed = append(failed, map[string]any{
					"Id": one.ID, "SenderFault": true, "Code": "InvalidParameterValue", "Message": message,
				})
				continue
			}
			done = append(done, map[string]any{"Id": one.ID})
			taken = append(taken, one.MessageBody)
		}
		_ = json.NewEncoder(answer).Encode(map[string]any{"Successful": done, "Failed": failed})
	}))
	t.Cleanup(server.Close)
	return server.URL, func() (found []string) {
		mu.Lock()
		defer mu.Unlock()
		for _, body := range taken {
			entries := []json.RawMessage{json.RawMessage(body)}
			_ = json.Unmarshal([]byte(body), &entries) // it stays as it is if it is one
			for _, one := range entries {
				if !strings.Contains(string(one), `"run_times"`) {
					found = append(found, string(one))
				}
			}
		}
		return found
	}
}

func sendingWorker(t *testing.T, options Options) (*Worker, context.Context) {
	t.Setenv("PENSTOCK_SQS_ACCESS_KEY", "id:secret")
	options.OutboundQueue, options.ResultsQueue, options.Region, options.Log = "http://x/out", "http://x/in", "eu-west-1", silent
	worker, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	go worker.sender.run(ctx)
	return worker, ctx
}

func TestAnAnswerThatTheQueueRefusesIsReplacedByAFinalError(t *testing.T) {
	for _, one := range []struct{ limit, step, result int }{
		{1 << 20, 400_000, 400_000}, // three texts of 400 000 bytes in one answer
		{262_144, 200_000, 0},       // a queue that was made before SQS accepted 1 MiB
	} {
		endpoint, taken := queueOf(t, one.limit)
		worker, ctx := sendingWorker(t, Options{Endpoint: endpoint, ResultLimit: 500_000, StepsLimit: 900_000})
		Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
			for _, name := range []string{"one", "two"} {
				run := func(context.Context) (string, error) { return strings.Repeat("x", one.step), nil }
				if _, err := Step(ctx, name, run); err != nil {
					return nil, err
				}
			}
			return strings.Repeat("x", one.result), nil
		})
		task := taskOf(worker, "1")
		worker.leases.add(task.lease)
		worker.attempt(ctx, ctx, task)
		messages := taken()
		if len(messages) != 3 || task.lease.open != 0 || len(worker.slots) != 0 {
			t.Fatal(len(messages), task.lease.open, len(worker.slots), ctx.Err())
		}
		var answer struct {
			ID    string
			Error errorObject
		}
		if err := json.Unmarshal([]byte(messages[2]), &answer); err != nil || answer.ID != "7:2:abc" {
			t.Error(messages[2][:200], err)
		}
		if answer.Error.Code != codeTooLarge || answer.Error.Data["final"] != true {
			t.Errorf("%+v", answer.Error)
		}
	}
}

func TestAStepWhoseReportTheQueueRefusesFailsItsTask(t *testing.T) {
	endpoint, taken := queueOf(t, 5000)
	worker, ctx := sendingWorker(t, Options{Endpoint: endpoint})
	Handle(worker, "mail", func(ctx context.Context, _ int) (any, error) {
		_, _ = Step(ctx, "load", func(context.Context) (string, error) { return strings.Repeat("x", 6000), nil })
		return 1, nil
	})
	task := taskOf(worker, "1")
	worker.leases.add(task.lease)
	worker.attempt(ctx, ctx, task)
	messages := taken()
	if len(messages) != 1 || !strings.Contains(messages[0], "the report of step load cannot be sent") ||
		!strings.Contains(messages[0], `"final":true`) || strings.Contains(messages[0], "steps") {
		t.Error(messages)
	}
}

func TestAnEntryThatTheQueueRefusesDoesNotHoldUpOthers(t *testing.T) {
	endpoint, taken := queueOf(t, 5000)
	worker, ctx := sendingWorker(t, Options{Endpoint: endpoint})
	var sending sync.WaitGroup
	failed := make(chan error, 4)
	for _, size := range []int{4000, 6000, 4000, 3000} { // in one message at first
		sending.Add(1)
		go func(size int) {
			defer sending.Done()
			if err := worker.sender.send(ctx, `"`+strings.Repeat("x", size)+`"`); err != nil {
				failed <- err
			}
		}(size)
	}
	sending.Wait()
	if len(failed) != 1 || len(taken()) != 3 || !strings.Contains((<-failed).Error(), "6002 bytes") {
		t.Error(len(failed), len(taken()))
	}
	if err := TaskOf(context.WithValue(ctx, taskKey{}, taskOf(worker, "1"))).Progress(ctx, 1, strings.Repeat("x", 1<<20)); err == nil {
		t.Error("a note of 1 MiB is sent")
	}
}
