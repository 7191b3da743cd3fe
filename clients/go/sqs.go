package penstock

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const answerBytes = 32 << 20 // more than ten messages of 1 MiB, each character escaped

// queueClient speaks the JSON protocol of SQS.
type queueClient struct {
	endpoint string
	region   string
	http     *http.Client
	provider *provider
}

type attribute struct {
	DataType    string
	StringValue string
}

type queueMessage struct {
	MessageID         string `json:"MessageId"`
	ReceiptHandle     string
	Body              string
	Attributes        map[string]string
	MessageAttributes map[string]attribute
}

type batchEntry struct {
	ID                string               `json:"Id"`
	MessageBody       string               `json:",omitempty"`
	MessageAttributes map[string]attribute `json:",omitempty"`
	ReceiptHandle     string               `json:",omitempty"`
	VisibilityTimeout *int                 `json:",omitempty"`
}

type batchAnswer struct {
	Successful []struct {
		ID string `json:"Id"`
	}
	Failed []struct {
		ID string `json:"Id"`
		queueError
		SenderFault bool
	}
}

// queueError is why SQS does not do a call, or an entry of one.
type queueError struct{ Code, Message string }

func (e *queueError) Error() string { return e.Code + ": " + e.Message }

// isFinal: the queue never takes this message, for its size or its characters.
func (e *queueError) isFinal() bool {
	code := e.Code[strings.LastIndexAny(e.Code, "#.")+1:]
	isSize := strings.HasPrefix(code, "InvalidParameterValue") && strings.Contains(e.Message, "shorter than")
	return isSize || code == "BatchRequestTooLong" || code == "InvalidMessageContents"
}

func (q *queueClient) call(ctx context.Context, action string, wait time.Duration, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	creds, err := q.provider.get(ctx)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, q.endpoint, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-amz-json-1.0")
	request.Header.Set("X-Amz-Target", "AmazonSQS."+action)
	sign(request, body, creds, q.region, "sqs", time.Now())
	answer, err := q.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, answerBytes))
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		var failure struct {
			Type    string `json:"__type"`
			Message string `json:"message"`
		}
		_ = json.Unmarshal(text, &failure) // the status says enough
		return fmt.Errorf("SQS answers %s to %s: %w", answer.Status, action, &queueError{failure.Type, failure.Message})
	}
	if out == nil || len(text) == 0 {
		return nil
	}
	return json.Unmarshal(text, out)
}

// urlOf returns the URL of a queue that is given by name or URL.
func (q *queueClient) urlOf(ctx context.Context, queue string) (string, error) {
	if strings.Contains(queue, "://") {
		return queue, nil
	}
	var found struct {
		URL string `json:"QueueUrl"`
	}
	err := q.call(ctx, "GetQueueUrl", callWait, map[string]string{"QueueName": queue}, &found)
	if err != nil {
		return "", fmt.Errorf("queue %s: %w", queue, err)
	}
	return found.URL, nil
}

func (q *queueClient) batch(ctx context.Context, action, url string, entries []batchEntry) (batchAnswer, error) {
	var answer batchAnswer
	in := map[string]any{"QueueUrl": url, "Entries": entries}
	err := q.call(ctx, action, callWait, in, &answer)
	return answer, err
}
